// Jobs on a device: the host layer of tests/gpu, which does everything as late as it may.
#include <gtest/gtest.h>

#include "tests/gpu/host/queued_device.h"
#include "tests/unit/server/subject.h"

namespace gradwire::testing_support {
namespace {

using kernels::cuda::DeviceShare;
using kernels::cuda::HostDeviceOptions;
using kernels::cuda::Lag;
using kernels::cuda::QueuedBackend;

class DeviceSubject final : public Subject {
 public:
  ~DeviceSubject() override {
    share_.reset();
    EXPECT_EQ(backend_.device().allocated(), 0) << "device or pinned memory was not freed";
  }
  void Set(JobEnvironment* environment) override {
    environment->backend = host_backend_.get();
    environment->device = share_.get();
  }

 private:
  const std::unique_ptr<kernels::Backend> host_backend_ = *kernels::MakeBackend("cpu");
  QueuedBackend backend_{"queued", HostDeviceOptions{.memory_bytes = 1 << 26}, Lag::kLatest};
  std::unique_ptr<DeviceShare> share_ = *DeviceShare::Make(&backend_, {.ring_slots = 4, .ring_slot_bytes = 1 << 10});
};

}  // namespace

std::unique_ptr<Subject> MakeSubject() { return std::make_unique<DeviceSubject>(); }

}  // namespace gradwire::testing_support

// The CUDA kernels on the host layer: orders of threads and blocks, blocks in parallel, and a device with little shared
// memory, on which sketches take the path through device memory.
#include <gtest/gtest.h>

#include "kernels/cuda/device_backend.h"
#include "tests/gpu/host/host_device.h"
#include "tests/gpu/subject.h"

namespace gradwire::kernels::cuda {
namespace {

class HostSubject final : public Subject {
 public:
  explicit HostSubject(const HostDeviceOptions& options) : backend_("cuda on the host", options) {}
  ~HostSubject() override { EXPECT_EQ(backend_.device().allocated(), 0) << "device memory was not freed"; }
  AsyncBackend& backend() override { return backend_; }

 private:
  OwningDeviceBackend<HostDevice> backend_;
};

NamedSubject Named(std::string name, const HostDeviceOptions& options) {
  return {std::move(name), [options] { return std::make_unique<HostSubject>(options); }};
}

}  // namespace

std::vector<NamedSubject> Subjects() {
#if defined(__SANITIZE_THREAD__)
  return {Named("ParallelBlocks", {.workers = 3}), Named("ParallelThreads", {.phase_workers = 3})};
#endif
  return {Named("Forward", {}), Named("Backward", {.order = Order::kBackward, .units = 1}),
          Named("Shuffled", {.order = Order::kShuffled, .units = 7}), Named("Parallel", {.workers = 3}),
          Named("LittleSharedMemory", {.order = Order::kShuffled, .shared_limit = 48 << 10})};
}

}  // namespace gradwire::kernels::cuda

// The devices of a Python package for tests: the host layer of tests/gpu, which does everything as late as it may,
// named as DLPack names what is no device of its own.
#include "absl/strings/str_cat.h"
#include "client/python/src/device.h"
#include "tests/gpu/host/queued_device.h"

namespace gradwire {
namespace {

constexpr int kDlExternal = 12;

}  // namespace

absl::StatusOr<std::shared_ptr<Device>> OpenDevice(int type, int index) {
  if (type != kDlExternal || index != 0)
    return absl::InvalidArgumentError(absl::StrCat("this package has one device, of DLPack type ", kDlExternal));
  const kernels::cuda::HostDeviceOptions options = {.memory_bytes = 1 << 28};
  return std::make_shared<kernels::cuda::QueuedBackend>("queued", options, kernels::cuda::Lag::kLatest);
}

}  // namespace gradwire

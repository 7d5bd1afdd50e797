// The host layer, which does things as late as it may.
#include "tests/gpu/host/queued_device.h"
#include "tests/integration/client/device_backends.h"

namespace gradwire::testing {
namespace {

NamedBackend Queued(std::string name, kernels::cuda::Lag lag) {
  const kernels::cuda::HostDeviceOptions options = {.memory_bytes = 1 << 28};
  return {std::move(name), [=] { return std::make_unique<kernels::cuda::QueuedBackend>("queued", options, lag); }};
}

}  // namespace

std::vector<NamedBackend> DeviceBackends() {
  return {Queued("latest", kernels::cuda::Lag::kLatest), Queued("random", kernels::cuda::Lag::kRandom)};
}

int DeviceRounds() { return 40; }

}  // namespace gradwire::testing

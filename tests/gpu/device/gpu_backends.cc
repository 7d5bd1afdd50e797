// Jobs on a GPU: 200 rounds each, next to the CPU's.
#include "kernels/cuda/cuda_backend.h"
#include "tests/integration/client/device_backends.h"

namespace gradwire::testing {

std::vector<NamedBackend> DeviceBackends() {
  return {{"gpu", [] { return std::unique_ptr<kernels::Backend>(*kernels::cuda::MakeAsyncCudaBackend()); }}};
}

int DeviceRounds() { return 200; }

}  // namespace gradwire::testing

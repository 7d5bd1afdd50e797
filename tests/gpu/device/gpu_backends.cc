// Jobs on a GPU: 200 rounds each, next to the CPU's.
#include <gtest/gtest.h>

#include "kernels/cuda/cuda_backend.h"
#include "tests/integration/client/device_backends.h"

namespace gradwire::testing {

std::vector<NamedBackend> DeviceBackends() {
  return {{"gpu", [] { return std::unique_ptr<kernels::Backend>(*kernels::cuda::MakeAsyncCudaBackend()); }}};
}

int DeviceRounds() { return 200; }

}  // namespace gradwire::testing

// Without a GPU there is nothing to test: says so and exits with 77.
int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const auto backend = gradwire::kernels::cuda::MakeAsyncCudaBackend();
  if (!backend.ok()) {
    std::printf("nothing was tested: %s\n", std::string(backend.status().message()).c_str());
    return 77;
  }
  return RUN_ALL_TESTS();
}

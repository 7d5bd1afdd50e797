// The main function of tests that need a GPU.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>

#include "kernels/cuda/cuda_backend.h"

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

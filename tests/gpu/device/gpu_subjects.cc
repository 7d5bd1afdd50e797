// The CUDA kernels on a GPU.
#include <gtest/gtest.h>

#include "kernels/cuda/cuda_backend.h"
#include "tests/gpu/subject.h"

namespace gradwire::kernels::cuda {
namespace {

class GpuSubject final : public Subject {
 public:
  AsyncBackend& backend() override { return *backend_; }

 private:
  const std::unique_ptr<AsyncBackend> backend_ = *MakeAsyncCudaBackend();
};

}  // namespace

std::vector<NamedSubject> Subjects() {
  return {{"Gpu", [] { return std::make_unique<GpuSubject>(); }}};
}

}  // namespace gradwire::kernels::cuda

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

// In place of the CUDA backend in a build without a CUDA compiler.
#include "kernels/cuda/cuda_backend.h"

namespace gradwire::kernels {

std::string WhyAutoIsNotCuda() { return "this build has no CUDA backend"; }

}  // namespace gradwire::kernels

namespace gradwire::kernels::cuda {

absl::StatusOr<std::unique_ptr<AsyncBackend>> MakeAsyncCudaBackend(int) {
  return absl::FailedPreconditionError(
      "backend 'cuda' is not part of this build, which had no CUDA compiler; use 'cpu', or 'auto' to take the best one "
      "there is (--backend)");
}

}  // namespace gradwire::kernels::cuda

// The CUDA backend for callers with host memory.
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/staged_backend.h"

namespace gradwire::kernels {

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend() {
  absl::StatusOr<std::unique_ptr<cuda::AsyncBackend>> device = cuda::MakeAsyncCudaBackend();
  if (!device.ok()) return device.status();
  return cuda::MakeStagedBackend(*std::move(device));
}

}  // namespace gradwire::kernels

// Instantiates every kernel for the GPU.
#include "kernels/cuda/cuda_device.cuh"
#include "kernels/cuda/device_backend.h"
#include "kernels/cuda/gpu_kernels.h"

namespace gradwire::kernels::cuda {
cudaError_t FindKernels() {
  cudaFuncAttributes attributes = {};
  return cudaFuncGetAttributes(&attributes, Run<Elementwise<AddOp>>);
}

std::unique_ptr<AsyncBackend> MakeGpuBackend(int device, uint32_t units, size_t shared_limit) {
  return std::make_unique<OwningDeviceBackend<CudaDevice>>("cuda", device, units, shared_limit);
}

}  // namespace gradwire::kernels::cuda

// What the CUDA compiler compiles, as the rest of this folder sees it.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "kernels/cuda/async_backend.h"

namespace gradwire::kernels::cuda {

// Whether the current device can run the kernels of this build.
cudaError_t FindKernels();

// On a device of that many multiprocessors and bytes of shared memory that a block may ask for.
std::unique_ptr<AsyncBackend> MakeGpuBackend(int device, uint32_t units, size_t shared_limit);

}  // namespace gradwire::kernels::cuda

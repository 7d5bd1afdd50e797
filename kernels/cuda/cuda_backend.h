// The CUDA backend as MakeBackend and a server path on the device see it. Without a CUDA compiler the same functions
// are there (cuda_absent.cc) and say that the build has no such backend.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cuda/async_backend.h"

namespace gradwire::kernels {

// Backend over host memory whose every operation runs on the GPU: operands are copied there and back, so it is correct
// everywhere and bound by PCIe. Errors: FailedPrecondition where no GPU can be used, saying why and what to do.
absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend();

// Why "auto" does not take the CUDA backend, for the log. Creates nothing on the GPU.
std::string WhyAutoIsNotCuda();

namespace cuda {

// The backend over the memory of a GPU, by its number in this process. Errors: as MakeCudaBackend. The calling thread's
// current device stays what it is.
absl::StatusOr<std::unique_ptr<AsyncBackend>> MakeAsyncCudaBackend(int device = 0);

}  // namespace cuda
}  // namespace gradwire::kernels

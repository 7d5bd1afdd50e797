// Finds the GPU and says why it cannot be used.
#include "kernels/cuda/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/gpu_kernels.h"

namespace gradwire::kernels {

std::string WhyAutoIsNotCuda() {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess) return absl::StrCat("no GPU, or no driver for it, was found: ", cudaGetErrorString(error));
  if (devices == 0) return "no GPU was found";
  return "its memory may be wanted by what trains beside this server; --backend=cuda takes it";
}

namespace cuda {
namespace {

absl::Status Unusable(const std::string& why) {
  return absl::FailedPreconditionError(
      absl::StrCat("backend 'cuda': ", why, "; use 'cpu', or 'auto' to take the best one there is (--backend)"));
}

// The one conversion of CUDA's errors to ours.
absl::Status ToStatus(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  cudaGetLastError();
  return Unusable(absl::StrCat(what, " (", cudaGetErrorName(error), ": ", cudaGetErrorString(error), ")"));
}

absl::StatusOr<int> Attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  const absl::Status status = ToStatus(cudaDeviceGetAttribute(&value, attribute, device), "the GPU cannot be asked");
  if (!status.ok()) return status;
  return value;
}

// `device` is current.
absl::StatusOr<std::unique_ptr<AsyncBackend>> MakeOnCurrent(int device) {
  const absl::StatusOr<int> units = Attribute(cudaDevAttrMultiProcessorCount, device);
  const absl::StatusOr<int> shared = Attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  const absl::StatusOr<int> pools = Attribute(cudaDevAttrMemoryPoolsSupported, device);
  for (const auto* value : {&units, &shared, &pools}) {
    if (!value->ok()) return value->status();
  }
  if (*pools == 0) return Unusable("the GPU's driver has no stream-ordered memory");
  absl::Status status =
      ToStatus(FindKernels(), "this build has no code for the GPU's compute capability (see CMAKE_CUDA_ARCHITECTURES)");
  if (!status.ok()) return status;
  // Memory that was freed stays with the process: scratch memory of the next launch costs nothing.
  cudaMemPool_t pool = nullptr;
  uint64_t keep = ~uint64_t{0};
  status = ToStatus(cudaDeviceGetDefaultMemPool(&pool, device), "the GPU has no memory pool");
  if (status.ok()) {
    status = ToStatus(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep), "its memory pool");
  }
  if (!status.ok()) return status;
  return MakeGpuBackend(device, static_cast<uint32_t>(*units), static_cast<size_t>(*shared));
}

}  // namespace

absl::StatusOr<std::unique_ptr<AsyncBackend>> MakeAsyncCudaBackend(int device) {
  int devices = 0;
  absl::Status status = ToStatus(cudaGetDeviceCount(&devices), "no GPU, or no driver for it, was found");
  if (!status.ok()) return status;
  if (device < 0 || device >= devices) {
    return Unusable(devices == 0 ? "no GPU was found"
                                 : absl::StrCat("GPU ", device, " of ", devices, " was asked for"));
  }
  int before = 0;
  status = ToStatus(cudaGetDevice(&before), "the current GPU is not known");
  if (!status.ok()) return status;
  status = ToStatus(cudaSetDevice(device), "the GPU cannot be used");
  if (!status.ok()) return status;
  absl::StatusOr<std::unique_ptr<AsyncBackend>> made = MakeOnCurrent(device);
  status = ToStatus(cudaSetDevice(before), "the GPU before cannot be used");
  if (!status.ok()) return status;
  return made;
}

}  // namespace cuda
}  // namespace gradwire::kernels

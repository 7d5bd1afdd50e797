// The CUDA kernels on a GPU.
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

// See reference_backend.h.
#include "kernels/cpu/reference/reference_backend.h"

namespace gradwire::kernels {

std::unique_ptr<Backend> MakeReferenceBackend() { return std::make_unique<ReferenceBackend>(); }

}  // namespace gradwire::kernels

// Choice of the backend.
#include "kernels/backend.h"

#include "absl/strings/str_format.h"
#include "kernels/cpu/reference/reference_backend.h"

namespace gradwire::kernels {

absl::StatusOr<std::unique_ptr<Backend>> MakeBackend(std::string_view name) {
  if (name == "auto" || name == "cpu") return MakeReferenceBackend();
  if (name == "cuda") {
    return absl::FailedPreconditionError(
        "backend 'cuda' is not part of this build; use 'cpu', or 'auto' to take the best one there is");
  }
  return absl::InvalidArgumentError(absl::StrFormat("unknown backend '%s'; known: auto, cpu, cuda", std::string(name)));
}

}  // namespace gradwire::kernels

// The SIMD backend: the reference's bits, by vectors. One source (the -inl.h files) is compiled for every target; the
// target is chosen when the backend is made and never again.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/backend.h"

namespace gradwire::kernels {

// Names of the targets that this machine can run, best first: "avx512", "avx2" or "neon". May be empty.
std::vector<std::string> SimdTargets();

// Null where this machine cannot run `target` or this build does not have it.
std::unique_ptr<Backend> MakeSimdBackend(std::string_view target);

}  // namespace gradwire::kernels

// The reference backend: plain loops over kernels/math, one element after the other. What every other backend must
// match bit for bit, and fast enough to run on (the compiler vectorises the element-wise loops).
#pragma once

#include <memory>

#include "kernels/backend.h"

namespace gradwire::kernels {

std::unique_ptr<Backend> MakeReferenceBackend();

}  // namespace gradwire::kernels

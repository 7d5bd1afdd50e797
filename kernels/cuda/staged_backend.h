// Backend over host memory on top of one over device memory.
#pragma once

#include <memory>

#include "kernels/cuda/async_backend.h"

namespace gradwire::kernels::cuda {

// Every operation copies its operands to the device and its results back, and waits: correct for every caller, bound by
// the bus. Host memory of any kind and alignment. The name is that of `device`. Thread-safe. Streams are ignored.
// Memory: the operands of the operations under way; where the device has not so much, the process ends.
std::unique_ptr<Backend> MakeStagedBackend(std::unique_ptr<AsyncBackend> device);

}  // namespace gradwire::kernels::cuda

// See buffer.h.
#include "kernels/cpu/simd/buffer.h"

#include <new>

namespace gradwire::kernels::simd {
namespace {

constexpr std::align_val_t kAlignment{64};

}  // namespace

Buffer::Buffer(size_t bytes) : data_(::operator new(bytes + 64, kAlignment)) {}
Buffer::~Buffer() { ::operator delete(data_, kAlignment); }

}  // namespace gradwire::kernels::simd

// See bitmap.h.
#include "kernels/cpu/bitmap.h"

#include <algorithm>

#include "kernels/cpu/reference/clones.h"

namespace gradwire::kernels {

GW_CLONES size_t UnionOf(const uint64_t* planes, size_t plane_count, size_t words, uint64_t* any) {
  size_t bits = 0;
  for (size_t w = 0; w < words; ++w) {
    uint64_t word = 0;
    for (size_t p = 0; p < plane_count; ++p) word |= planes[p * words + w];
    any[w] = word;
    bits += static_cast<size_t>(std::popcount(word));
  }
  return bits;
}

GW_CLONES size_t PositionsOf(const uint64_t* words, size_t count, uint32_t* out) {
  constexpr size_t kBlock = 64;
  size_t n = 0;
  for (size_t w = 0; w < count; w += kBlock) {
    n += IndicesOf(words + w, std::min(kBlock, count - w), static_cast<uint32_t>(w * 64), out + n);
  }
  return n;
}

}  // namespace gradwire::kernels

// From bitmaps to indices.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace gradwire::kernels {

// Entries behind the last index that IndicesOf may write.
inline constexpr size_t kIndexRoom = 4;

// Writes the numbers of the one bits of `count` words, ascending, and returns how many there are. Four at a time
// without a branch: at the densities that are sent, a branch per bit costs more than the bits.
inline __attribute__((always_inline)) size_t IndicesOf(const uint64_t* words, size_t count, uint32_t* out) {
  uint32_t* const begin = out;
  for (size_t w = 0; w < count; ++w) {
    uint64_t word = words[w];
    const int bits = std::popcount(word);
    const uint32_t base = static_cast<uint32_t>(w * 64);
    for (int i = 0; i < bits || i == 0; i += 4) {
      for (int j = 0; j < 4; ++j) {
        out[i + j] = base + static_cast<uint32_t>(std::countr_zero(word));
        word &= word - 1;
      }
    }
    out += bits;
  }
  return static_cast<size_t>(out - begin);
}

}  // namespace gradwire::kernels

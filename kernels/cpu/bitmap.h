// From bitmaps to indices.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace gradwire::kernels {

// Entries behind the last index that IndicesOf may write.
inline constexpr size_t kIndexRoom = 16;

template <int kAtOnce>
inline __attribute__((always_inline)) size_t IndicesAtOnce(const uint64_t* words, size_t count, uint32_t first,
                                                           uint32_t* out) {
  uint32_t* const begin = out;
  for (size_t w = 0; w < count; ++w) {
    uint64_t word = words[w];
    const int bits = std::popcount(word);
    const uint32_t base = first + static_cast<uint32_t>(w * 64);
    int i = 0;
    do {
      for (int j = 0; j < kAtOnce; ++j) {
        uint32_t index = base + static_cast<uint32_t>(std::countr_zero(word));
        asm("" : "+r"(index));  // else GCC collects the indices in a vector first, one by one, which is slower
        out[i + j] = index;
        word &= word - 1;
      }
      i += kAtOnce;
    } while (__builtin_expect(i < bits, 0));
    out += bits;
  }
  return static_cast<size_t>(out - begin);
}

// Writes first + the numbers of the one bits of `count` words, ascending, and returns how many there are. So many at a
// time without a branch that most words need no more: a branch that is guessed wrong costs more than the bits.
inline __attribute__((always_inline)) size_t IndicesOf(const uint64_t* words, size_t count, uint32_t first,
                                                       uint32_t* out) {
  size_t bits = 0;
  for (size_t w = 0; w < count; ++w) bits += static_cast<size_t>(std::popcount(words[w]));
  if (bits == 0) return 0;
  if (bits <= count) return IndicesAtOnce<4>(words, count, first, out);
  if (bits <= 4 * count) return IndicesAtOnce<8>(words, count, first, out);
  return IndicesAtOnce<16>(words, count, first, out);
}

// The bits that are one in any of `planes` bitmaps, each `words` long, one behind the other. Writes the bitmap of the
// union to `any` and returns how many bits it has.
size_t UnionOf(const uint64_t* planes, size_t plane_count, size_t words, uint64_t* any);

// IndicesOf, compiled for the machine it runs on; room for kIndexRoom entries behind the last.
size_t PositionsOf(const uint64_t* words, size_t count, uint32_t* out);

}  // namespace gradwire::kernels

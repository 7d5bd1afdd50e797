// See bitmap.h.
#include "kernels/cpu/bitmap.h"

#include <algorithm>
#include <bit>

#include "kernels/cpu/reference/clones.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gradwire::kernels {
namespace {

// So many at a time without a branch that most words need no more: a branch that is guessed wrong costs more than the
// bits.
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

#if defined(__x86_64__)
#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 says so of its own intrinsics
#endif
// A word is the mask by which one instruction moves the numbers 0 to 63 together.
__attribute__((target("avx512f,avx512bw,avx512vbmi2,popcnt"))) size_t IndicesByCompress(const uint64_t* words,
                                                                                        size_t count, uint32_t first,
                                                                                        uint32_t* out) {
  alignas(64) uint8_t numbers[64];
  for (uint8_t i = 0; i < 64; ++i) numbers[i] = i;
  const __m512i all = _mm512_load_si512(numbers);
  uint32_t* const begin = out;
  __m512i base = _mm512_set1_epi32(static_cast<int>(first));
  for (size_t w = 0; w < count; ++w) {
    const int bits = std::popcount(words[w]);
    const __m512i packed = _mm512_maskz_compress_epi8(words[w], all);
    _mm512_storeu_si512(out, _mm512_add_epi32(base, _mm512_cvtepu8_epi32(_mm512_castsi512_si128(packed))));
    if (__builtin_expect(bits > 16, 0)) {
      _mm512_storeu_si512(out + 16, _mm512_add_epi32(base, _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(packed, 1))));
      _mm512_storeu_si512(out + 32, _mm512_add_epi32(base, _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(packed, 2))));
      _mm512_storeu_si512(out + 48, _mm512_add_epi32(base, _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(packed, 3))));
    }
    out += bits;
    base = _mm512_add_epi32(base, _mm512_set1_epi32(64));
  }
  return static_cast<size_t>(out - begin);
}

#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif

bool HasCompress() {
  static const bool has = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vbmi2");
  return has;
}
#endif

}  // namespace

GW_CLONES size_t IndicesByBit(const uint64_t* words, size_t count, uint32_t first, uint32_t* out) {
  constexpr size_t kBlock = 64;
  size_t n = 0;
  for (size_t w = 0; w < count; w += kBlock) {
    const uint64_t* const block = words + w;
    const size_t length = std::min(kBlock, count - w);
    const uint32_t base = first + static_cast<uint32_t>(w * 64);
    size_t bits = 0;
    for (size_t i = 0; i < length; ++i) bits += static_cast<size_t>(std::popcount(block[i]));
    if (bits == 0) continue;
    if (bits <= length) {
      n += IndicesAtOnce<4>(block, length, base, out + n);
    } else if (bits <= 4 * length) {
      n += IndicesAtOnce<8>(block, length, base, out + n);
    } else {
      n += IndicesAtOnce<16>(block, length, base, out + n);
    }
  }
  return n;
}

size_t IndicesOf(const uint64_t* words, size_t count, uint32_t first, uint32_t* out) {
#if defined(__x86_64__)
  if (HasCompress()) return IndicesByCompress(words, count, first, out);
#endif
  return IndicesByBit(words, count, first, out);
}

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

}  // namespace gradwire::kernels

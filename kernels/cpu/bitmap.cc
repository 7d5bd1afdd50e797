// See bitmap.h.
#include "kernels/cpu/bitmap.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <type_traits>

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
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
alignas(64) constexpr std::array<uint8_t, 64> kNumbers = [] {
  std::array<uint8_t, 64> numbers{};
  for (uint8_t i = 0; i < 64; ++i) numbers[i] = i;
  return numbers;
}();

// A word is the mask by which one instruction moves the numbers 0 to 63 together.
__attribute__((target("avx512f,avx512bw,avx512vbmi2,popcnt"))) size_t IndicesByCompress(const uint64_t* words,
                                                                                        size_t count, uint32_t first,
                                                                                        uint32_t* out) {
  const __m512i all = _mm512_load_si512(kNumbers.data());
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

__attribute__((target("avx512f,avx512bw,avx512vbmi2,popcnt"))) size_t TakeByCompress(uint8_t* cells, uint32_t first,
                                                                                     uint32_t* numbers,
                                                                                     int32_t* values) {
  const __m512i held = _mm512_loadu_si512(cells);
  const __mmask64 set = _mm512_test_epi8_mask(held, held);
  const __m512i which = _mm512_maskz_compress_epi8(set, _mm512_load_si512(kNumbers.data()));
  const __m512i what = _mm512_maskz_compress_epi8(set, held);
  const __m512i base = _mm512_set1_epi32(static_cast<int>(first));
  _mm512_storeu_si512(cells, _mm512_setzero_si512());
  _mm512_storeu_si512(numbers, _mm512_add_epi32(base, _mm512_cvtepu8_epi32(_mm512_castsi512_si128(which))));
  _mm512_storeu_si512(values, _mm512_cvtepi8_epi32(_mm512_castsi512_si128(what)));
  const int bits = std::popcount(static_cast<uint64_t>(set));
  if (__builtin_expect(bits > 16, 0)) {
    _mm512_storeu_si512(numbers + 16,
                        _mm512_add_epi32(base, _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(which, 1))));
    _mm512_storeu_si512(numbers + 32,
                        _mm512_add_epi32(base, _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(which, 2))));
    _mm512_storeu_si512(numbers + 48,
                        _mm512_add_epi32(base, _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(which, 3))));
    _mm512_storeu_si512(values + 16, _mm512_cvtepi8_epi32(_mm512_extracti32x4_epi32(what, 1)));
    _mm512_storeu_si512(values + 32, _mm512_cvtepi8_epi32(_mm512_extracti32x4_epi32(what, 2)));
    _mm512_storeu_si512(values + 48, _mm512_cvtepi8_epi32(_mm512_extracti32x4_epi32(what, 3)));
  }
  return static_cast<size_t>(bits);
}

#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif

bool HasCompress() {
  static const bool has = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vbmi2");
  return has;
}
#endif

// Eight at a time: the highest bit of each byte says whether it is 0, and a product brings these together.
inline __attribute__((always_inline)) uint64_t NonzeroOf(const uint8_t* cells) {
  constexpr uint64_t kHighest = 0x8080'8080'8080'8080;
  uint64_t found = 0;
  for (int i = 0; i < 64; i += 8) {
    uint64_t eight;
    std::memcpy(&eight, cells + i, sizeof(eight));
    const uint64_t set = (((eight & ~kHighest) + ~kHighest) | eight) & kHighest;
    found |= (set * 0x0002'0408'1020'4081 >> 56) << i;
  }
  return found;
}

template <typename Cell>
inline __attribute__((always_inline)) uint64_t NonzeroOf(const Cell* cells) {
  uint64_t found = 0;
  for (int i = 0; i < 64; ++i) found |= uint64_t{cells[i] != 0} << i;
  return found;
}

template <typename Cell>
inline __attribute__((always_inline)) size_t TakeOneByOne(Cell* cells, uint32_t first, uint32_t* numbers,
                                                          int32_t* values) {
  constexpr int kAtOnce = 8;  // without a branch, as above
  uint64_t set = NonzeroOf(cells);
  const int bits = std::popcount(set);
  for (int i = 0; i < bits; i += kAtOnce) {
    for (int j = i; j < i + kAtOnce; ++j) {
      const int number = std::countr_zero(set);
      numbers[j] = first + static_cast<uint32_t>(number);
      values[j] = static_cast<std::make_signed_t<Cell>>(cells[number & 63]);
      set &= set - 1;
    }
  }
  std::fill_n(cells, 64, Cell{0});
  return static_cast<size_t>(bits);
}

}  // namespace

GW_CLONES size_t TakeNonzeroByCell(uint8_t* cells, uint32_t first, uint32_t* numbers, int32_t* values) {
  return TakeOneByOne(cells, first, numbers, values);
}
size_t TakeNonzero(uint8_t* cells, uint32_t first, uint32_t* numbers, int32_t* values) {
#if defined(__x86_64__)
  if (HasCompress()) return TakeByCompress(cells, first, numbers, values);
#endif
  return TakeNonzeroByCell(cells, first, numbers, values);
}
GW_CLONES size_t TakeNonzero(uint16_t* cells, uint32_t first, uint32_t* numbers, int32_t* values) {
  return TakeOneByOne(cells, first, numbers, values);
}
GW_CLONES size_t TakeNonzero(uint32_t* cells, uint32_t first, uint32_t* numbers, int32_t* values) {
  return TakeOneByOne(cells, first, numbers, values);
}

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

// See zigzag.h. Eight codes fill whole bytes, so each eight of them lie alike.
#include "kernels/cpu/zigzag.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gradwire::kernels {
namespace {

constexpr size_t kGroup = 8;

// Two codes at any offset within a byte fit into 64 bits, and one of them fills half a byte at least. Where the pairs
// of a group begin: whole bytes and bits behind them.
struct PairPlaces {
  explicit PairPlaces(int bits) {
    for (size_t i = 0; i < kGroup / 2; ++i) {
      const size_t at = 2 * i * static_cast<size_t>(bits);
      bytes[i] = at / 8;
      skips[i] = at % 8;
    }
  }
  // Of a group, up to the end of its last word.
  size_t bytes_touched() const { return bytes[kGroup / 2 - 1] + sizeof(uint64_t); }

  size_t bytes[kGroup / 2];
  uint64_t skips[kGroup / 2];
};

#if defined(__x86_64__)
#define GW_AVX2 __attribute__((target("avx2")))

GW_AVX2 size_t PackByVector(std::span<const int32_t> values, int bits, std::span<uint8_t> out) {
  const PairPlaces places(bits);
  const __m256i low = _mm256_set1_epi64x(0xFFFFFFFF);
  const __m128i width = _mm_cvtsi32_si128(bits);
  const __m256i skips = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(places.skips));
  // What of a pair is left for the next word; the first pair of a group has none in front.
  const __m256i rests =
      _mm256_blend_epi32(_mm256_sub_epi64(_mm256_set1_epi64x(2 * bits), skips), _mm256_set1_epi64x(64), 0b11);
  size_t done = 0;
  size_t at = 0;
  for (; values.size() - done >= kGroup && at + places.bytes_touched() <= out.size(); done += kGroup) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values.data() + done));
    const __m256i codes = _mm256_xor_si256(_mm256_slli_epi32(v, 1), _mm256_srai_epi32(v, 31));
    const __m256i pairs =
        _mm256_or_si256(_mm256_and_si256(codes, low), _mm256_sll_epi64(_mm256_srli_epi64(codes, 32), width));
    const __m256i before = _mm256_permute4x64_epi64(pairs, 0b10'01'00'00);
    const __m256i words = _mm256_or_si256(_mm256_sllv_epi64(pairs, skips), _mm256_srlv_epi64(before, rests));
    uint8_t* const to = out.data() + at;
    const __m128i first = _mm256_castsi256_si128(words), second = _mm256_extracti128_si256(words, 1);
    const long long ordered[] = {_mm_cvtsi128_si64(first), _mm_extract_epi64(first, 1), _mm_cvtsi128_si64(second),
                                 _mm_extract_epi64(second, 1)};
    for (size_t i = 0; i < kGroup / 2; ++i) std::memcpy(to + places.bytes[i], &ordered[i], sizeof(ordered[i]));
    at += static_cast<size_t>(bits);
  }
  return done;
}

// A code and the bits in front of it in its first byte fit into 32 bits.
constexpr int kMostVectorBits = 25;

GW_AVX2 size_t UnpackByVector(std::span<const uint8_t> packed, int bits, size_t n, int32_t* out) {
  // Half a group lies within 16 bytes; the second half begins on a byte or in its middle.
  const size_t half = static_cast<size_t>(bits) / 2;
  alignas(32) uint8_t sources[32];
  alignas(32) uint32_t skips[kGroup];
  for (size_t i = 0; i < kGroup; ++i) {
    const size_t from = i * static_cast<size_t>(bits) - (i < kGroup / 2 ? 0 : half * 8);
    skips[i] = static_cast<uint32_t>(from % 8);
    for (size_t byte = 0; byte < 4; ++byte) sources[i * 4 + byte] = static_cast<uint8_t>(from / 8 + byte);
  }
  const __m256i source = _mm256_load_si256(reinterpret_cast<const __m256i*>(sources));
  const __m256i skip = _mm256_load_si256(reinterpret_cast<const __m256i*>(skips));
  const __m256i mask = _mm256_set1_epi32(static_cast<int>((uint32_t{1} << bits) - 1));
  const __m256i one = _mm256_set1_epi32(1);
  size_t done = 0;
  size_t at = 0;
  for (; n - done >= kGroup && at + half + 16 <= packed.size(); done += kGroup) {
    const uint8_t* const from = packed.data() + at;
    const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + half));
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set_m128i(second, first), source);
    const __m256i codes = _mm256_and_si256(_mm256_srlv_epi32(bytes, skip), mask);
    const __m256i signs = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_and_si256(codes, one));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + done), _mm256_xor_si256(_mm256_srli_epi32(codes, 1), signs));
    at += static_cast<size_t>(bits);
  }
  return done;
}

bool HasAvx2() {
  static const bool has = __builtin_cpu_supports("avx2");
  return has;
}
#endif

}  // namespace

size_t PackZigZagByPair(std::span<const int32_t> values, int bits, std::span<uint8_t> out) {
  const PairPlaces places(bits);
  const uint64_t width = 2 * static_cast<uint64_t>(bits);
  size_t done = 0;
  size_t at = 0;
  for (; values.size() - done >= kGroup && at + places.bytes_touched() <= out.size(); done += kGroup) {
    const int32_t* const v = values.data() + done;
    uint64_t before = 0;
    for (size_t i = 0; i < kGroup / 2; ++i) {
      const uint64_t pair = uint64_t{ZigZag(v[2 * i])} | uint64_t{ZigZag(v[2 * i + 1])} << bits;
      const uint64_t word = pair << places.skips[i] | before >> (width - places.skips[i]);
      std::memcpy(out.data() + at + places.bytes[i], &word, sizeof(word));
      before = pair;
    }
    at += static_cast<size_t>(bits);
  }
  return done;
}

size_t UnpackZigZagByPair(std::span<const uint8_t> packed, int bits, size_t n, int32_t* out) {
  const PairPlaces places(bits);
  const uint64_t mask = (uint64_t{1} << bits) - 1;
  size_t done = 0;
  size_t at = 0;
  for (; n - done >= kGroup && at + places.bytes_touched() <= packed.size(); done += kGroup) {
    for (size_t i = 0; i < kGroup / 2; ++i) {
      uint64_t word = 0;
      std::memcpy(&word, packed.data() + at + places.bytes[i], sizeof(word));
      word >>= places.skips[i];
      out[done + 2 * i] = UnZigZag(static_cast<uint32_t>(word & mask));
      out[done + 2 * i + 1] = UnZigZag(static_cast<uint32_t>(word >> bits & mask));
    }
    at += static_cast<size_t>(bits);
  }
  return done;
}

size_t PackZigZag(std::span<const int32_t> values, int bits, std::span<uint8_t> out) {
#if defined(__x86_64__)
  if (HasAvx2()) return PackByVector(values, bits, out);
#endif
  return PackZigZagByPair(values, bits, out);
}

size_t UnpackZigZag(std::span<const uint8_t> packed, int bits, size_t n, int32_t* out) {
#if defined(__x86_64__)
  if (bits <= kMostVectorBits && HasAvx2()) return UnpackByVector(packed, bits, n, out);
#endif
  return UnpackZigZagByPair(packed, bits, n, out);
}

}  // namespace gradwire::kernels

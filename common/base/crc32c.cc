// CRC-32C. With SSE4.2, three independent streams: one crc32 instruction has a latency of three cycles but a throughput
// of one; they are joined by multiplying with x^(8*stride) in GF(2), from tables. With AVX-512 and VPCLMULQDQ, long
// data is folded instead: 256 bytes at a time are multiplied with x^2048 and added to the next (Gopal et al., "Fast CRC
// Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009); twice as fast, from the cache.
#include "common/base/crc32c.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <array>
#include <cstring>

#include "common/base/little_endian.h"

namespace gradwire {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78u;  // reflected

using ByteTable = std::array<uint32_t, 256>;

constexpr std::array<ByteTable, 8> MakeSlicingTables() {
  std::array<ByteTable, 8> t{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int k = 0; k < 8; ++k) c = (c & 1) ? (c >> 1) ^ kPolynomial : c >> 1;
    t[0][i] = c;
  }
  for (uint32_t i = 0; i < 256; ++i) {
    for (size_t k = 1; k < 8; ++k) t[k][i] = (t[k - 1][i] >> 8) ^ t[0][t[k - 1][i] & 0xFF];
  }
  return t;
}
constexpr std::array<ByteTable, 8> kSlicing = MakeSlicingTables();

// a * b in GF(2)[x] modulo the polynomial, bit-reflected: x^0 is the top bit.
constexpr uint32_t MultiplyModP(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t m = 1u << 31; m != 0; m >>= 1) {
    if (a & m) product ^= b;
    b = (b & 1) ? (b >> 1) ^ kPolynomial : b >> 1;
  }
  return product;
}

// x^bits modulo the polynomial.
constexpr uint32_t PowerOfX(size_t bits) {
  uint32_t result = 1u << 31;
  uint32_t square = 1u << 30;  // x^1
  for (; bits != 0; bits >>= 1) {
    if (bits & 1) result = MultiplyModP(square, result);
    square = MultiplyModP(square, square);
  }
  return result;
}

// Tables that append `bytes` zero bytes to a CRC state.
constexpr std::array<ByteTable, 4> MakeShiftTables(size_t bytes) {
  const uint32_t factor = PowerOfX(8 * bytes);
  std::array<ByteTable, 4> t{};
  for (size_t k = 0; k < 4; ++k) {
    for (uint32_t i = 0; i < 256; ++i) t[k][i] = MultiplyModP(factor, i << (8 * k));
  }
  return t;
}

constexpr size_t kLongStride = 4096;
constexpr size_t kShortStride = 256;
constexpr std::array<ByteTable, 4> kLongShift = MakeShiftTables(kLongStride);
constexpr std::array<ByteTable, 4> kShortShift = MakeShiftTables(kShortStride);

uint32_t Shift(const std::array<ByteTable, 4>& t, uint32_t crc) {
  return t[0][crc & 0xFF] ^ t[1][(crc >> 8) & 0xFF] ^ t[2][(crc >> 16) & 0xFF] ^ t[3][crc >> 24];
}

// Where what was read is copied to, if anywhere.
struct NoCopy {
  void Put(size_t, uint64_t) {}
#if defined(__x86_64__)
  __attribute__((target("avx512f"), always_inline)) void PutVector(size_t, __m512i) {}
#endif
  void Advance(size_t) {}
  void Byte(uint8_t) {}
};
struct CopyTo {
  uint8_t* out;
  void Put(size_t at, uint64_t v) { std::memcpy(out + at, &v, sizeof(v)); }
#if defined(__x86_64__)
  __attribute__((target("avx512f"), always_inline)) void PutVector(size_t at, __m512i v) {
    _mm512_storeu_si512(out + at, v);
  }
#endif
  void Advance(size_t n) { out += n; }
  void Byte(uint8_t v) { *out++ = v; }
};

#if defined(__x86_64__)
#define GW_FOLD_TARGET __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.2")))
#define GW_FOLD_INLINE GW_FOLD_TARGET __attribute__((always_inline)) inline

constexpr size_t kVectorBytes = 64;
constexpr size_t kFoldBytes = 4 * kVectorBytes;  // at a time, in four accumulators
constexpr size_t kFoldFrom = 4 * kFoldBytes;     // shorter data is left to the crc32 instruction

// What 128 bits are multiplied with to stand so many bits further ahead: the first 64 of them have 64 more to go. A
// carry-less product of two reflected factors is one bit short, and 32-bit remainders lie in the upper half.
struct Ahead {
  uint64_t first, second;
};
constexpr Ahead MakeAhead(size_t bits) {
  return {uint64_t{PowerOfX(bits + 63)} << 32, uint64_t{PowerOfX(bits - 1)} << 32};
}
constexpr Ahead kFoldAhead = MakeAhead(8 * kFoldBytes);
constexpr Ahead kVectorAhead = MakeAhead(8 * kVectorBytes);

GW_FOLD_INLINE __m512i Broadcast(const Ahead& ahead) {
  const auto first = static_cast<long long>(ahead.first);
  const auto second = static_cast<long long>(ahead.second);
  return _mm512_set4_epi64(second, first, second, first);
}
// x further ahead, plus y.
GW_FOLD_INLINE __m512i Fold(__m512i x, __m512i ahead, __m512i y) {
  const __m512i first = _mm512_clmulepi64_epi128(x, ahead, 0x00);
  const __m512i second = _mm512_clmulepi64_epi128(x, ahead, 0x11);
  return _mm512_ternarylogic_epi64(first, second, y, 0x96);  // the sum of all three
}
template <typename Copy>
GW_FOLD_INLINE __m512i Take(const uint8_t* p, size_t at, Copy& copy) {
  const __m512i v = _mm512_loadu_si512(p + at);
  copy.PutVector(at, v);
  return v;
}

// Takes whole vectors; leaves less than one. Precondition: n >= kFoldBytes.
template <typename Copy>
GW_FOLD_TARGET uint32_t FoldVectors(const uint8_t*& p, size_t& n, Copy& copy, uint32_t state) {
  __m512i a = _mm512_xor_si512(Take(p, 0, copy), _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state))));
  __m512i b = Take(p, kVectorBytes, copy);
  __m512i c = Take(p, 2 * kVectorBytes, copy);
  __m512i d = Take(p, 3 * kVectorBytes, copy);
  const __m512i far_ahead = Broadcast(kFoldAhead);
  size_t at = kFoldBytes;
  for (; at + kFoldBytes <= n; at += kFoldBytes) {
    a = Fold(a, far_ahead, Take(p, at, copy));
    b = Fold(b, far_ahead, Take(p, at + kVectorBytes, copy));
    c = Fold(c, far_ahead, Take(p, at + 2 * kVectorBytes, copy));
    d = Fold(d, far_ahead, Take(p, at + 3 * kVectorBytes, copy));
  }
  const __m512i next = Broadcast(kVectorAhead);
  d = Fold(Fold(Fold(a, next, b), next, c), next, d);
  for (; at + kVectorBytes <= n; at += kVectorBytes) d = Fold(d, next, Take(p, at, copy));
  p += at;
  n -= at;
  copy.Advance(at);
  // The crc32 instruction is linear in state and data: what is left of 64 bytes is as if it had been read.
  alignas(kVectorBytes) std::array<uint64_t, 8> rest;
  _mm512_store_si512(rest.data(), d);
  uint64_t s = 0;
  for (uint64_t word : rest) s = __builtin_ia32_crc32di(s, word);
  return static_cast<uint32_t>(s);
}

template <typename Copy>
__attribute__((target("sse4.2"))) uint32_t ThreeStreams(const uint8_t*& p, size_t& n, Copy& copy, uint32_t state,
                                                        size_t stride, const std::array<ByteTable, 4>& shift) {
  while (n >= 3 * stride) {
    uint64_t a = state, b = 0, c = 0;
    for (size_t i = 0; i < stride; i += 8) {
      const uint64_t x = Load<uint64_t>(p + i), y = Load<uint64_t>(p + stride + i),
                     z = Load<uint64_t>(p + 2 * stride + i);
      a = __builtin_ia32_crc32di(a, x);
      b = __builtin_ia32_crc32di(b, y);
      c = __builtin_ia32_crc32di(c, z);
      copy.Put(i, x);
      copy.Put(stride + i, y);
      copy.Put(2 * stride + i, z);
    }
    state = Shift(shift, static_cast<uint32_t>(a)) ^ static_cast<uint32_t>(b);
    state = Shift(shift, state) ^ static_cast<uint32_t>(c);
    p += 3 * stride;
    n -= 3 * stride;
    copy.Advance(3 * stride);
  }
  return state;
}

template <typename Copy>
__attribute__((target("sse4.2"))) uint32_t Crc32cSse42(const uint8_t* p, size_t n, Copy copy, uint32_t state,
                                                       bool may_fold) {
  if (n >= 3 * kShortStride) {
    if (may_fold && n >= kFoldFrom) state = FoldVectors(p, n, copy, state);
    state = ThreeStreams(p, n, copy, state, kLongStride, kLongShift);
    state = ThreeStreams(p, n, copy, state, kShortStride, kShortShift);
  }
  uint64_t s = state;
  for (; n >= 8; p += 8, n -= 8) {
    s = __builtin_ia32_crc32di(s, Load<uint64_t>(p));
    copy.Put(0, Load<uint64_t>(p));
    copy.Advance(8);
  }
  state = static_cast<uint32_t>(s);
  for (; n > 0; ++p, --n) {
    state = __builtin_ia32_crc32qi(state, *p);
    copy.Byte(*p);
  }
  return state;
}

enum class Cpu { kAny, kSse42, kFolds };
Cpu CpuOfThis() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("sse4.2")) return Cpu::kAny;
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq") ? Cpu::kFolds : Cpu::kSse42;
}
// Most of what has a checksum is a header, which takes no longer than asking whether a static is there. Until this one
// is, at the program's start, it says kAny, which is right everywhere.
const Cpu kCpu = CpuOfThis();
#endif

}  // namespace

uint32_t Crc32cPortable(std::span<const uint8_t> data, uint32_t crc) {
  uint32_t state = ~crc;
  const uint8_t* p = data.data();
  size_t n = data.size();
  for (; n >= 8; p += 8, n -= 8) {
    const uint64_t w = Load<uint64_t>(p) ^ state;
    state = 0;
    for (size_t k = 0; k < 8; ++k) state ^= kSlicing[7 - k][(w >> (8 * k)) & 0xFF];
  }
  for (; n > 0; ++p, --n) state = (state >> 8) ^ kSlicing[0][(state ^ *p) & 0xFF];
  return ~state;
}

uint32_t Crc32cUnfolded(std::span<const uint8_t> data, uint32_t crc) {
#if defined(__x86_64__)
  if (kCpu != Cpu::kAny) return ~Crc32cSse42(data.data(), data.size(), NoCopy{}, ~crc, false);
#endif
  return Crc32cPortable(data, crc);
}

uint32_t Crc32c(std::span<const uint8_t> data, uint32_t crc) {
#if defined(__x86_64__)
  if (kCpu != Cpu::kAny) return ~Crc32cSse42(data.data(), data.size(), NoCopy{}, ~crc, kCpu == Cpu::kFolds);
#endif
  return Crc32cPortable(data, crc);
}

uint32_t CopyCrc32c(std::span<const uint8_t> data, uint8_t* out, uint32_t crc) {
#if defined(__x86_64__)
  if (kCpu != Cpu::kAny) return ~Crc32cSse42(data.data(), data.size(), CopyTo{out}, ~crc, kCpu == Cpu::kFolds);
#endif
  if (!data.empty()) std::memcpy(out, data.data(), data.size());
  return Crc32cPortable(data, crc);
}

}  // namespace gradwire

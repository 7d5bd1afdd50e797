// What every scalar kernel shares: the host+device marker, bit casts, powers of two, and the counter-based hash.
// Only operations that IEEE 754 rounds exactly (+ - * / sqrt, conversions) are used here, so every backend that
// compiles these functions without contraction gives the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define GW_HD __host__ __device__ __forceinline__
#else
#define GW_HD inline
#endif

namespace gradwire::kernels {

GW_HD uint32_t FloatBits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

GW_HD float FloatFromBits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

GW_HD uint64_t DoubleBits(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

// 2^e. Precondition: -126 <= e <= 127, so that the result is a normal float.
GW_HD float PowerOfTwo(int e) { return FloatFromBits(static_cast<uint32_t>(e + 127) << 23); }

// Nearest integer, ties to even, of |x| < 2^23; larger values are integers already and are returned as they are. The
// two additions round to nearest even, which is the default mode that every backend runs in.
GW_HD float RoundToEven(float x) {
  const float magic = 8388608.0f;  // 2^23
  const float magnitude = FloatFromBits(FloatBits(x) & 0x7FFFFFFFu);
  const float sign = FloatFromBits((FloatBits(x) & 0x80000000u) | 0x3F800000u);
  return magnitude < magic ? ((magnitude + magic) - magic) * sign : x;
}

// SplitMix64's finalizer (Steele, Lea, Flood 2014); the same function as gradwire::Mix64.
GW_HD uint64_t Mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

}  // namespace gradwire::kernels

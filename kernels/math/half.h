// IEEE 754 binary16 by integer arithmetic: the same bits with and without hardware for it.
#pragma once

#include "kernels/math/math.h"

namespace gradwire::kernels {

inline constexpr float kLargestHalf = 65504.0f;

// Without branches, so that loops over these are vectorised.
GW_HD float HalfToFloat(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t magnitude = bits & 0x7FFFu;
  const uint32_t special = 0x7F800000u | (magnitude & 0x3FFu) << 13;
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  // Subnormal: multiples of 2^-24, which float32 holds exactly.
  const uint32_t subnormal = FloatBits(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t finite = magnitude >= 0x0400u ? normal : subnormal;
  return FloatFromBits(sign | (magnitude >= 0x7C00u ? special : finite));
}

// The nearest binary16, ties to even. Beyond the largest finite one: that, so that a residual keeps what is missing.
// Precondition: x is not NaN.
GW_HD uint16_t FloatToHalf(float x) {
  const uint32_t bits = FloatBits(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  // Below 2^-14: 0.5 has a spacing of 2^-24, so adding it rounds to a multiple of that.
  const uint32_t subnormal = FloatBits(FloatFromBits(magnitude) + 0.5f) - 0x3F000000u;
  const uint32_t odd = (magnitude >> 13) & 1u;
  const uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + odd) >> 13;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  return static_cast<uint16_t>(sign | (magnitude >= 0x477FF000u ? 0x7BFFu : finite));  // would round to 65536
}

}  // namespace gradwire::kernels

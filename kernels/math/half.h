// IEEE 754 binary16 by integer arithmetic: the same bits with and without hardware for it.
#pragma once

#include "kernels/math/math.h"

namespace gradwire::kernels {

inline constexpr float kLargestHalf = 65504.0f;

GW_HD float HalfToFloat(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t magnitude = bits & 0x7FFFu;
  if (magnitude >= 0x7C00u) return FloatFromBits(sign | 0x7F800000u | (magnitude & 0x3FFu) << 13);
  if (magnitude >= 0x0400u) return FloatFromBits(sign | ((magnitude << 13) + (112u << 23)));
  // Subnormal: multiples of 2^-24, which float32 holds exactly.
  const float value = static_cast<float>(magnitude) * 0x1p-24f;
  return sign != 0 ? -value : value;
}

// The nearest binary16, ties to even. Beyond the largest finite one: that, so that a residual keeps what is missing.
// Precondition: x is not NaN.
GW_HD uint16_t FloatToHalf(float x) {
  const uint32_t bits = FloatBits(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7BFFu);  // would round to 65536
  if (magnitude < 0x38800000u) {
    // Below 2^-14: 0.5 has a spacing of 2^-24, so adding it rounds to a multiple of that.
    const float shifted = FloatFromBits(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (FloatBits(shifted) - 0x3F000000u));
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  return static_cast<uint16_t>(sign | ((magnitude - (112u << 23) + 0xFFFu + odd) >> 13));
}

}  // namespace gradwire::kernels

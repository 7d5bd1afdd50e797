// Fixed point: integers times 2^exponent, the float32 grid of dense sums, and bfloat16.
// Sums of integers are exact and independent of the order of arrival.
#pragma once

#include "kernels/math/math.h"

namespace gradwire::kernels {

// Exponents outside are refused wherever they come off a wire: inside, 2^e and 2^-e are normal floats and so is every
// integer times 2^e.
inline constexpr int kMinExponent = -80;
inline constexpr int kMaxExponent = 64;

// Largest float32 that is an integer not above `limit`. Precondition: limit >= 0.
GW_HD float LargestFloatWithin(int32_t limit) {
  float f = static_cast<float>(limit);
  if (static_cast<double>(f) > static_cast<double>(limit)) f = FloatFromBits(FloatBits(f) - 1);
  return f;
}

// q = clamp(round_to_even(x / 2^exponent), -limit, limit) and *rest = x - q * 2^exponent, exactly; where that
// difference is not a float32, q is 0 and *rest is x. `inverse` = 2^-exponent, `unit` = 2^exponent, `limit` =
// LargestFloatWithin(integer limit). Precondition: x is finite.
GW_HD int32_t QuantizeOne(float x, float inverse, float unit, float limit, float* rest) {
  float scaled = x * inverse;  // exact unless it underflows (then it rounds to 0) or overflows (then it is clamped)
  scaled = scaled > limit ? limit : scaled;
  scaled = scaled < -limit ? -limit : scaled;
  const float rounded = RoundToEven(scaled);
  const float sent = rounded * unit;  // exact: |rounded| < 2^31 has 24 significant bits
  const float difference = x - sent;
  // Dekker's FastTwoSum: the rounding error of x - sent. Where |x| < |sent| <= 2|x|, Sterbenz' lemma makes it 0.
  const float error = -sent - (difference - x);
  const bool exact = error == 0.0f;
  *rest = exact ? difference : x;
  return exact ? static_cast<int32_t>(rounded) : 0;
}

// The mean over `contributors` of a sum: integer * 2^exponent / contributors, each operation rounded once.
GW_HD float MeanOfInteger(int32_t sum, float unit, float contributors) {
  return static_cast<float>(sum) * unit / contributors;
}

// Smallest e with |x| <= 2^e, unclamped, for the bits of a finite |x| > 0. Subnormals count as 2^-126.
GW_HD int RangeOfBits(uint32_t magnitude_bits) {
  const int exponent = static_cast<int>(magnitude_bits >> 23);
  if (exponent == 0) return -126;
  return exponent - 127 + ((magnitude_bits & 0x7FFFFFu) != 0 ? 1 : 0);
}

GW_HD float Bf16ToFloat(uint16_t bits) { return FloatFromBits(static_cast<uint32_t>(bits) << 16); }

// Rounds to nearest even. NaN stays NaN. The bfloat16 is the upper half; the lower one says nothing.
GW_HD uint32_t Bf16InUpperHalf(float x) {
  const uint32_t bits = FloatBits(x);
  return (bits & 0x7FFFFFFFu) > 0x7F800000u ? bits | 0x400000u : bits + 0x7FFFu + ((bits >> 16) & 1u);
}
GW_HD uint16_t FloatToBf16(float x) { return static_cast<uint16_t>(Bf16InUpperHalf(x) >> 16); }

}  // namespace gradwire::kernels

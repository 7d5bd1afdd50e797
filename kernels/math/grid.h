// The fixed grid of dense sums (64-bit integers of 2^-kGridBits), and the element of bfloat16 with an exact rest.
#pragma once

#include "kernels/math/fixed_point.h"

namespace gradwire::kernels {

// Fixed grid of float32 sums: 2^-44 (5.7e-14) apart, single values below 2^18 = 262144, so 64 and more of them fit.
inline constexpr int kGridBits = 44;
inline constexpr int kGridRangeBits = 18;

// Bits of 2^kGridRangeBits: magnitudes from here on, infinities and NaN among them, are out of the grid.
inline constexpr uint32_t kGridLimitBits = static_cast<uint32_t>(127 + kGridRangeBits) << 23;

// x * 2^kGridBits rounded to nearest even, for |x| < 2^kGridRangeBits: llrint by additions, which every vector unit
// has. Adding kGridHigh leaves the scaled value's multiple of 2^28 in the low bits of the sum, adding kGridLow the
// integer of what is left. Every step but the last is exact: a float32 has 24 bits, and the multiples of 2^28 are even.
inline constexpr double kGridScale = 17592186044416.0;  // 2^kGridBits
inline constexpr int kGridHighBits = 28;
inline constexpr double kGridHigh = 0x1.8p80;  // ulp 2^kGridHighBits
inline constexpr double kGridLow = 0x1.8p52;   // ulp 1
static_assert(kGridScale == static_cast<double>(int64_t{1} << kGridBits));
static_assert(kGridBits + kGridRangeBits < 80 - 1);

GW_HD uint64_t ToGrid(float x) {
  const double scaled = static_cast<double>(x) * kGridScale;
  const double high = scaled + kGridHigh;
  const double low = (scaled - (high - kGridHigh)) + kGridLow;
  return ((DoubleBits(high) - DoubleBits(kGridHigh)) << kGridHighBits) + (DoubleBits(low) - DoubleBits(kGridLow));
}

// The mean over `contributors` of a sum of grid values, each operation rounded once. `unit` = 2^-kGridBits.
GW_HD float GridMean(int64_t sum, float unit, float contributors) {
  return static_cast<float>(sum) * unit / contributors;
}

// The bfloat16 nearest to x, ties to even; *rest = x minus it. Where that would be infinity, the largest finite one:
// the rest keeps what is missing.
GW_HD uint16_t SplitBf16(float x, float* rest) {
  uint16_t bits = FloatToBf16(x);
  if ((bits & 0x7FFFu) == 0x7F80u) bits = static_cast<uint16_t>(bits - 1);
  *rest = x - Bf16ToFloat(bits);
  return bits;
}

}  // namespace gradwire::kernels

// The fixed grid of dense sums (64-bit integers of 2^-kGridBits), and the element of bfloat16 with an exact rest.
#pragma once

#include "kernels/math/fixed_point.h"

namespace gradwire::kernels {

// Fixed grid of float32 sums: 2^-44 (5.7e-14) apart, single values below 2^18 = 262144. Two of them fit into a sum of
// 64 bits; where there may be more, each has to stay below its share (GridLimitBits).
inline constexpr int kGridBits = 44;
inline constexpr int kGridRangeBits = 18;

// Bits of 2^kGridRangeBits: magnitudes from here on, infinities and NaN among them, are out of every grid.
inline constexpr uint32_t kGridLimitBits = static_cast<uint32_t>(127 + kGridRangeBits) << 23;

// Bits of the magnitude from which on values are refused where a sum may have `values` of them (1 to 2^24): of
// 2^(63 - kGridBits) / values, rounded toward 0, and at most 2^kGridRangeBits. What is below, rounded to the grid, lies
// at least a unit below the share, so no sum of so many leaves 64 bits.
constexpr uint32_t GridLimitBits(uint32_t values) {
  constexpr int kSumRangeBits = 63 - kGridBits;
  if (values <= 1u << (kSumRangeBits - kGridRangeBits)) return kGridLimitBits;
  // Long division: 24 bits of 2^kSumRangeBits / values, the first of which is not 0.
  int exponent = kSumRangeBits;
  uint64_t rest = 1;
  for (; rest < values; rest *= 2) --exponent;
  uint32_t digits = 0;
  for (int bit = 0; bit < 24; ++bit, rest *= 2) {
    digits = 2 * digits + (rest >= values ? 1 : 0);
    if (rest >= values) rest -= values;
  }
  return (static_cast<uint32_t>(127 + exponent) << 23) + (digits - (1u << 23));
}
static_assert(GridLimitBits(1) == kGridLimitBits && GridLimitBits(2) == kGridLimitBits);
static_assert(GridLimitBits(4) == static_cast<uint32_t>(127 + 17) << 23);

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

inline constexpr float kLargestBf16 = 0x1.FEp127f;

// The bfloat16 nearest to x, ties to even, of magnitude `largest` (a finite bfloat16) at most; *rest = x minus it, so
// that it keeps what is missing. NaN stays NaN.
GW_HD uint16_t SplitBf16(float x, float largest, float* rest) {
  // Bounded before it is rounded, which gives the same as the other way round: rounding keeps order.
  const float above = x > largest ? largest : x;  // either keeps NaN, and is one instruction
  const float bounded = above < -largest ? -largest : above;
  const uint32_t rounded = Bf16InUpperHalf(bounded);
  *rest = x - FloatFromBits(rounded & 0xFFFF0000u);
  return static_cast<uint16_t>(rounded >> 16);
}

}  // namespace gradwire::kernels

// See reductions.h.
#include "common/codec/bits/reductions.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/reference/clones.h"
#include "kernels/math/math.h"

namespace gradwire {
namespace {

constexpr size_t kSumLanes = 8;

// Sum of value(x[i]).
template <typename Value>
inline __attribute__((always_inline)) double SumOf(const float* x, size_t n, Value value) {
  double sums[kSumLanes] = {};
  size_t i = 0;
  for (; i + kSumLanes <= n; i += kSumLanes)
    for (size_t lane = 0; lane < kSumLanes; ++lane) sums[lane] += value(static_cast<double>(x[i + lane]));
  for (size_t lane = 0; i < n; ++i, ++lane) sums[lane] += value(static_cast<double>(x[i]));
  double sum = 0;
  for (const double part : sums) sum += part;
  return sum;
}

}  // namespace

GW_CLONES float LargestMagnitude(const float* x, size_t n) {
  uint32_t largest = 0;  // bits of magnitudes are in their order
  for (size_t i = 0; i < n; ++i) largest = std::max(largest, kernels::FloatBits(x[i]) & 0x7FFFFFFFu);
  return kernels::FloatFromBits(largest);
}

GW_CLONES double Sum(const float* x, size_t n) {
  return SumOf(x, n, [](double value) { return value; });
}

GW_CLONES double SumOfMagnitudes(const float* x, size_t n) {
  return SumOf(x, n, [](double value) { return std::fabs(value); });
}

GW_CLONES double SumOfSquares(const float* x, size_t n) {
  return SumOf(x, n, [](double value) { return value * value; });
}

GW_CLONES SignedSums SumsBySign(const float* x, size_t n) {
  SignedSums sums;
  sums.positive = SumOf(x, n, [](double value) { return value >= 0 ? value : 0.0; });
  sums.negative = SumOf(x, n, [](double value) { return value >= 0 ? 0.0 : value; });
  uint32_t positives = 0;
  for (size_t i = 0; i < n; ++i) positives += static_cast<uint32_t>(x[i] >= 0);
  sums.positives = positives;
  return sums;
}

}  // namespace gradwire

// Reference backend: what is added to the residual, the magnitude histograms, and taking what is selected.
#include "kernels/math/select.h"

#include <algorithm>
#include <vector>

#include "kernels/cpu/reference/clones.h"
#include "kernels/cpu/reference/loops.h"
#include "kernels/math/fixed_point.h"

namespace gradwire::kernels::reference {
namespace {

constexpr size_t kBlock = 64;

// Indices within the block whose key is at least `key`. Branch-free, so density does not matter.
inline __attribute__((always_inline)) size_t Candidates(const float* x, size_t n, uint32_t key, uint8_t* index) {
  size_t count = 0;
  for (size_t i = 0; i < n; ++i) {
    index[count] = static_cast<uint8_t>(i);
    count += KeyOf(x[i]) >= key ? 1 : 0;
  }
  return count;
}

inline __attribute__((always_inline)) bool AnyAtLeast(const float* x, uint32_t key) {
  uint32_t largest = 0;
  for (size_t i = 0; i < kBlock; ++i) largest = std::max(largest, FloatBits(x[i]) & 0x7FFFFFFFu);
  return (largest >> kKeyShift) >= key;
}

}  // namespace

GW_CLONES void Add(float* __restrict x, const float* __restrict y, size_t n) {
  for (size_t i = 0; i < n; ++i) x[i] += y[i];
}

GW_CLONES void AddPreconditioned(float* __restrict x, const float* __restrict gradient, float* __restrict second_moment,
                                 size_t n, const PreconditionCoefficients& coefficients) {
  const PreconditionCoefficients c = coefficients;
  for (size_t i = 0; i < n; ++i) x[i] += Precondition(gradient[i], &second_moment[i], c);
}

void UpperHistogram(const float* x, size_t n, uint64_t* bins) {
  constexpr size_t kBins = size_t{1} << kUpperBits;
  // Two histograms: neighbours that fall into the same bin do not wait for each other.
  std::vector<uint64_t> odd(kBins, 0);
  std::fill(bins, bins + kBins, uint64_t{0});
  uint64_t zeros = 0;
  size_t i = 0;
  for (; i + 2 <= n; i += 2) {
    zeros += (x[i] == 0.0f) + (x[i + 1] == 0.0f);
    ++bins[KeyOf(x[i]) >> kLowerBits];
    ++odd[KeyOf(x[i + 1]) >> kLowerBits];
  }
  for (; i < n; ++i) {
    zeros += x[i] == 0.0f;
    ++bins[KeyOf(x[i]) >> kLowerBits];
  }
  for (size_t b = 0; b < kBins; ++b) bins[b] += odd[b];
  bins[0] -= zeros;
}

void LowerHistogram(const float* x, size_t n, uint32_t upper, uint64_t* bins) {
  constexpr uint32_t kMask = (1u << kLowerBits) - 1;
  std::fill(bins, bins + kMask + 1, uint64_t{0});
  uint64_t zeros = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t key = KeyOf(x[i]);
    if ((key >> kLowerBits) != upper) continue;
    zeros += x[i] == 0.0f;
    ++bins[key & kMask];
  }
  if (upper == 0) bins[0] -= zeros;
}

GW_CLONES void MarkAtLeast(const float* x, size_t n, uint32_t least, uint64_t* words) {
  for (size_t begin = 0; begin < n; begin += kBlock) {
    uint64_t word = 0;
    const size_t length = std::min(kBlock, n - begin);
    for (size_t i = 0; i < length; ++i)
      word |= static_cast<uint64_t>((FloatBits(x[begin + i]) & 0x7FFFFFFFu) >= least) << i;
    words[begin / kBlock] = word;
  }
}

GW_CLONES size_t TakeSelected(float* x, size_t n, const SelectArgs& args, uint32_t first_position, uint32_t* positions,
                              int32_t* integers) {
  const float inverse = PowerOfTwo(-args.exponent);
  const float unit = PowerOfTwo(args.exponent);
  const float limit = LargestFloatWithin(args.limit);
  size_t taken = 0;
  uint8_t index[kBlock];
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t length = std::min(kBlock, n - begin);
    if (length == kBlock && !AnyAtLeast(x + begin, args.key)) continue;
    const size_t candidates = Candidates(x + begin, length, args.key, index);
    for (size_t c = 0; c < candidates; ++c) {
      const size_t i = begin + index[c];
      if (!IsSelected(x[i], args.key, args.keep_below, args.first_element + i, args.phase)) continue;
      float rest;
      const int32_t q = QuantizeOne(x[i], inverse, unit, limit, &rest);
      if (q == 0) continue;
      x[i] = rest;
      positions[taken] = first_position + static_cast<uint32_t>(i);
      integers[taken] = q;
      ++taken;
    }
  }
  return taken;
}

}  // namespace gradwire::kernels::reference

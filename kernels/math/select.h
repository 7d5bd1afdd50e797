// Which elements are sent: a magnitude key per element, a threshold, what it is found from, and a rule for those that
// tie with it.
#pragma once

#include "kernels/math/math.h"

namespace gradwire::kernels {

// 8 exponent and 15 mantissa bits decide: fine enough that ties are few, coarse enough for a two-pass histogram.
inline constexpr int kKeyShift = 8;
inline constexpr int kKeyBits = 31 - kKeyShift;
inline constexpr int kUpperBits = 12;  // of the key: the first pass; the rest is the second
inline constexpr int kLowerBits = kKeyBits - kUpperBits;

GW_HD uint32_t KeyOf(float x) { return (FloatBits(x) & 0x7FFFFFFFu) >> kKeyShift; }

// How closely a threshold is wanted.
enum class Accuracy {
  kExact,     // that of all elements
  kEstimate,  // that of a sample, where there are enough of them: within 5 % of what is wanted
};

inline constexpr uint64_t kSampleLine = 16;         // elements that are looked at together: 64 bytes
inline constexpr uint64_t kLeastSampled = 1 << 15;  // wanted elements that a sample must hold
inline constexpr uint64_t kLeastStride = 8;         // with less, reading everything in order is as fast
inline constexpr uint64_t kMostStride = 64;

// The elements from which a threshold is found: of each stretch of `stride` lines one, at a place that hashing picks,
// so that no period of the data meets it and no cluster of two stretches or more is missed. What fills no stretch is
// left out. Elements that come and go by whole lines are met to within sqrt(kSampleLine / kLeastSampled) = 2.2 % (one
// standard deviation), independent ones to within 0.6 %.
struct LineSample {
  uint64_t stride = 1;  // 1: all elements
  uint64_t size = 0;    // elements; a multiple of kSampleLine unless these are all
  double wanted = 0;    // of them

  // The line that is the sample's `line`-th.
  GW_HD uint64_t LineAt(uint64_t line) const { return line * stride + ((Mix(line) >> 32) * stride >> 32); }
  // The element that is the sample's i-th.
  GW_HD uint64_t At(uint64_t i) const {
    return stride == 1 ? i : LineAt(i / kSampleLine) * kSampleLine + i % kSampleLine;
  }
};

// Of n elements, of which `wanted` are wanted.
inline LineSample SampleOf(uint64_t n, double wanted, Accuracy accuracy) {
  const double elements = static_cast<double>(n);
  const double sampled = (elements < wanted ? elements : wanted) / static_cast<double>(kLeastSampled);
  if (accuracy == Accuracy::kExact || !(sampled >= static_cast<double>(kLeastStride))) {
    return {.stride = 1, .size = n, .wanted = wanted};
  }
  const uint64_t stride = sampled < static_cast<double>(kMostStride) ? static_cast<uint64_t>(sampled) : kMostStride;
  const uint64_t size = n / (stride * kSampleLine) * kSampleLine;
  return {.stride = stride, .size = size, .wanted = wanted * (static_cast<double>(size) / elements)};
}

// Position of an element in the order in which ties are taken, in units of 2^-32: a Weyl sequence (multiples of the
// golden ratio) shifted by a phase that depends on (seed, tensor, round). Unlike independent coin flips it takes the
// wanted fraction of any stretch of consecutive ties to within a few elements, which matters because in the first
// round of a job that pushes steps every magnitude is exactly 1.
GW_HD uint32_t TieOrder(uint64_t element, uint32_t phase) {
  return static_cast<uint32_t>(element * 0x9E3779B9ull) + phase;
}

// The phase of one tensor in one round. `tensor`: a hash of its name, so that it does not depend on the others.
GW_HD uint32_t TiePhase(uint64_t seed, uint64_t tensor, uint64_t round) {
  return static_cast<uint32_t>(Mix(Mix(seed ^ Mix(tensor)) ^ Mix(round)) >> 32);
}

// keep_below such that `wanted` of `ties` elements are taken. Precondition: wanted >= 0, ties > 0.
GW_HD uint64_t ShareOfTies(double wanted, uint64_t ties) {
  const double share = wanted / static_cast<double>(ties);
  return static_cast<uint64_t>((share < 1.0 ? share : 1.0) * 4294967296.0);
}

// Zero is never selected.
GW_HD bool IsSelected(float x, uint32_t key, uint64_t keep_below, uint64_t element, uint32_t phase) {
  const uint32_t k = KeyOf(x);
  if (k != key) return k > key;
  return x != 0.0f && TieOrder(element, phase) < keep_below;
}

}  // namespace gradwire::kernels

// Which elements are sent: a magnitude key per element, a threshold, and a rule for those that tie with it.
#pragma once

#include "kernels/math/math.h"

namespace gradwire::kernels {

// 8 exponent and 15 mantissa bits decide: fine enough that ties are few, coarse enough for a two-pass histogram.
inline constexpr int kKeyShift = 8;
inline constexpr int kKeyBits = 31 - kKeyShift;
inline constexpr int kUpperBits = 12;  // of the key: the first pass; the rest is the second
inline constexpr int kLowerBits = kKeyBits - kUpperBits;

GW_HD uint32_t KeyOf(float x) { return (FloatBits(x) & 0x7FFFFFFFu) >> kKeyShift; }

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

// Finding the threshold's key without counting every element into a histogram: where it must lie, from a sample, and
// the exact key among the few elements that lie there.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/backend.h"
#include "kernels/cpu/simd/buffer.h"
#include "kernels/math/select.h"

namespace gradwire::kernels {

// A range of magnitudes (float bits without sign; multiples of 2^kKeyShift) and what one pass finds of it.
struct Bracket {
  uint32_t low = 0;
  uint32_t high = 0;              // exclusive
  uint32_t* collected = nullptr;  // room for `capacity`
  size_t capacity = 0;
  uint64_t above = 0;  // elements with magnitude >= high
  size_t inside = 0;   // collected
};

// One search among the elements of a sample, or all. `x` must not change meanwhile.
class BracketSearch {
 public:
  BracketSearch(const float* x, const LineSample& among);

  // The next range to count; null when brackets are of no use here: too few elements, too many ties, or none of the
  // guesses held the threshold.
  Bracket* Next();
  // From what was counted: true and the threshold if it lies in the bracket.
  bool Finish(Threshold* found);

 private:
  // Calls count(magnitude) for the elements of a few of the lines.
  template <class Count>
  void ForEachSampled(const Count& count) const;
  // Counts their magnitudes: those within [low, high) in bins, as narrow as there is room for.
  void Look(uint32_t low, uint32_t high);
  // The lower edge of the bin at which `count` sampled elements lie above; that of the lowest bin if there are not as
  // many.
  uint32_t EdgeAbove(double count) const;
  // Whether what the sample says of [low, high) leaves the room for it.
  bool Fits(uint32_t low, uint32_t high) const;
  Threshold Exact() const;

  const float* const x_;
  const LineSample among_;
  const LineSample few_;   // of the lines of among_
  double per_sample_ = 0;  // elements per sampled element; 0: no sample
  double sampled_ = 0;     // wanted elements within the sample
  int attempt_ = 0;
  double margin_ = 0;  // of sampled elements, to both sides
  double shift_ = 0;   // of the guess, from what attempts found
  Bracket bracket_;
  uint32_t begin_ = 0;  // the lowest magnitude that is counted in bins
  int bin_shift_ = 0;
  uint64_t above_ = 0;  // sampled elements beyond the bins
  simd::Buffer bins_;
  simd::Buffer blocks_;  // sums of neighbouring bins
  simd::Buffer collected_;
};

}  // namespace gradwire::kernels

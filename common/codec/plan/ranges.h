// How the exponent of a run follows the magnitudes that workers see: merged exactly, so that merging stays invertible.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "common/codec/codec.h"
#include "kernels/backend.h"

namespace gradwire {

// Largest integer one worker may send so that the sum over `max_workers` never wraps in `bits`-bit two's complement.
inline int32_t IntegerLimit(int bits, uint32_t max_workers) {
  const int64_t top = (int64_t{1} << (bits - 1)) - 1;
  return static_cast<int32_t>(top / max_workers);
}

// The exponent of the next round for a run whose largest |value| lies within 2^range: the value maps to at most
// limit / 2^headroom. Rises at once; falls only by two or more, so that it does not flicker.
inline int8_t NextExponent(int8_t current, int range, int32_t limit, int headroom) {
  const int log_limit = std::bit_width(static_cast<uint32_t>(limit)) - 1;
  const int wanted = range - log_limit + headroom;
  if (current == kUncalibrated || wanted > current || wanted <= current - 2) return static_cast<int8_t>(wanted);
  return current;
}

// A histogram of the ranges that workers sent, per run. Constant size however many workers there are; Add and Remove
// are exact inverses.
class RangeHistogram {
 public:
  explicit RangeHistogram(size_t runs, int least = kernels::kMinRange, int largest = kernels::kMaxRange)
      : least_(least), largest_(largest), bins_(runs * Bins(), 0) {}

  void Clear() { std::fill(bins_.begin(), bins_.end(), uint16_t{0}); }

  // Of runs from `begin` on. Errors: InvalidArgument; nothing is changed then.
  absl::Status Check(uint64_t begin, std::span<const int8_t> ranges) const {
    const uint64_t runs = bins_.size() / Bins();
    if (begin > runs || ranges.size() > runs - begin) {
      return absl::InvalidArgumentError(
          absl::StrFormat("ranges of runs [%d, %d + %d); the bucket has %d runs", begin, begin, ranges.size(), runs));
    }
    for (size_t i = 0; i < ranges.size(); ++i) {
      if (ranges[i] < least_ || ranges[i] > largest_) {
        return absl::InvalidArgumentError(
            absl::StrFormat("run %d: range %d is outside [%d, %d]", begin + i, ranges[i], least_, largest_));
      }
      if (Bin(begin + i, ranges[i]) == UINT16_MAX) return absl::InvalidArgumentError("too many contributions");
    }
    return absl::OkStatus();
  }

  // Precondition: Check returned OK (kAdd), or these were added before (kSubtract).
  void Merge(uint64_t begin, std::span<const int8_t> ranges, kernels::Sign sign) {
    for (size_t i = 0; i < ranges.size(); ++i) {
      uint16_t& bin = bins_[Index(begin + i, ranges[i])];
      bin = static_cast<uint16_t>(bin + static_cast<int>(sign));
    }
  }

  // The same of `segment`: kRanges, a byte per run.
  absl::Status Check(const wire::Segment& segment) const {
    if (segment.bytes != segment.count)
      return absl::InvalidArgumentError(absl::StrFormat("ranges of %d runs in %d bytes", segment.count, segment.bytes));
    return Check(segment.begin, RangesOf(segment));
  }
  void Merge(const wire::Segment& segment, kernels::Sign sign) { Merge(segment.begin, RangesOf(segment), sign); }

  // Largest range seen for a run; the least one - 1 if none was.
  int Max(size_t run) const {
    for (int range = largest_; range >= least_; --range) {
      if (Bin(run, range) != 0) return range;
    }
    return least_ - 1;
  }

  size_t memory_bytes() const { return bins_.size() * sizeof(uint16_t); }

 private:
  static std::span<const int8_t> RangesOf(const wire::Segment& segment) {
    return {reinterpret_cast<const int8_t*>(segment.data), segment.count};
  }
  size_t Bins() const { return static_cast<size_t>(largest_ - least_) + 1; }
  size_t Index(size_t run, int range) const { return run * Bins() + static_cast<size_t>(range - least_); }
  uint16_t Bin(size_t run, int range) const { return bins_[Index(run, range)]; }

  int least_;
  int largest_;
  std::vector<uint16_t> bins_;
};

}  // namespace gradwire

// What encoder and accumulators of the dense codecs share: sizes of one bucket, checks, and what update frames say.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "common/codec/codec.h"
#include "common/codec/grid/grid_limit.h"
#include "common/codec/plan/ranges.h"
#include "common/job/round_mode.h"
#include "kernels/backend.h"

namespace gradwire::dense {

inline constexpr uint32_t kSegmentElements = 65536;  // 256 KiB of float32: checked, merged and CRC'd while in cache

// Immutable.
struct DenseShape {
  CodecContext context;
  DenseSpec spec;
  bool fixed() const { return spec.fixed(); }
  int width() const {
    return spec.values == DenseSpec::Values::kFp32 || spec.values == DenseSpec::Values::kFixed32 ? 4 : 2;
  }
  wire::SegmentType type() const {
    if (fixed()) return wire::SegmentType::kDenseInt;
    return width() == 4 ? wire::SegmentType::kDenseF32 : wire::SegmentType::kDenseBf16;
  }
  uint8_t param() const { return fixed() ? static_cast<uint8_t>(width()) : 0; }
  uint32_t limit_bits() const { return GridLimitBits(*context.job); }  // of floats
  SentLimit sent_limit() const {                                       // the same
    return SentLimitOf(context, width() == 4 ? kAllDigits : kBf16Digits);
  }
  int32_t limit() const { return IntegerLimit(8 * width(), context.job->spec().max_workers()); }
  bool CarriesValues(uint64_t round) const { return gradwire::CarriesValues(*context.job, round); }
  const BucketLayout& layout() const { return *context.layout; }
  kernels::Backend& backend() const { return *context.backend; }

  // A segment of values of this codec, within the bucket. Errors: InvalidArgument.
  absl::Status CheckSegment(uint64_t round, const wire::Segment& segment) const;
  // InvalidArgument for an integer over limit().
  absl::Status OverLimit(uint64_t position, int32_t integer) const;
  // The plan of the next round, from that of this one and the ranges that workers sent. As it is, unless fixed().
  RoundPlan NextPlan(const RoundPlan& plan, const RangeHistogram& ranges) const;
};

// The sums of all elements, each segment packed if that is smaller.
void WriteSums(std::span<const int32_t> sums, wire::FrameWriter* writer);
// The exponents of the next round, behind everything else.
void WriteExponents(const RoundPlan& next, wire::FrameWriter* writer);

}  // namespace gradwire::dense

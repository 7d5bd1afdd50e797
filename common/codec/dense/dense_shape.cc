// See dense_shape.h.
#include "common/codec/dense/dense_shape.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "common/codec/bits/index_code.h"
#include "common/codec/frame/run_pieces.h"

namespace gradwire::dense {

using wire::FrameWriter;
using wire::Segment;
using wire::SegmentType;

namespace {

constexpr int kFixed32Headroom = 8;  // bits left for gradients that grow from one round to the next
constexpr int kFixed16Headroom = 1;
constexpr int kPackBelowBits = 25;  // wider sums travel as whole int32

}  // namespace

absl::Status DenseShape::CheckSegment(uint64_t round, const Segment& s) const {
  if (!CarriesValues(round) || s.type != type() || s.param != param()) {
    return absl::InvalidArgumentError(absl::StrFormat("segment type %d (param %d) does not belong in round %d of %s",
                                                      static_cast<int>(s.type), s.param, round, ToString(spec)));
  }
  const uint64_t elements = layout().elements;
  if (s.begin > elements || s.count > elements - s.begin ||
      s.bytes != uint64_t{s.count} * static_cast<uint64_t>(width())) {
    return absl::InvalidArgumentError(
        absl::StrFormat("segment of elements [%d, %d + %d) in %d bytes; the bucket has %d elements of %d bytes",
                        s.begin, s.begin, s.count, s.bytes, elements, width()));
  }
  return absl::OkStatus();
}

absl::Status DenseShape::OverLimit(uint64_t position, int32_t integer) const {
  const size_t run = RunOf(layout(), position);
  const Run& r = layout().runs[run];
  return absl::InvalidArgumentError(absl::StrFormat(
      "tensor '%s', element %d: integer %d is over the limit of %d per worker", context.job->tensors()[r.tensor].name,
      r.offset + position - layout().run_begin[run], integer, limit()));
}

RoundPlan DenseShape::NextPlan(const RoundPlan& plan, const RangeHistogram& ranges) const {
  RoundPlan next = plan;
  if (!fixed()) return next;
  const int headroom = width() == 4 ? kFixed32Headroom : kFixed16Headroom;
  for (size_t i = 0; i < next.exponents.size(); ++i) {
    const int range = ranges.Max(i);
    if (range < kernels::kMinRange) continue;
    // Nothing anywhere: following it down would hold back most of the first gradient that comes.
    if (range == kernels::kMinRange && plan.exponents[i] != kUncalibrated) continue;
    next.exponents[i] = NextExponent(plan.exponents[i], range, limit(), headroom);
  }
  return next;
}

void WriteSums(std::span<const int32_t> sums, FrameWriter* writer) {
  for (uint64_t begin = 0; begin < sums.size(); begin += kSegmentElements) {
    const uint32_t count = static_cast<uint32_t>(std::min<uint64_t>(kSegmentElements, sums.size() - begin));
    const std::span<const int32_t> part = sums.subspan(begin, count);
    const int bits = BitsFor(part);
    if (bits < kPackBelowBits) {
      const uint32_t bytes = static_cast<uint32_t>(PackedBytes(count, bits));
      PackIntegers(part, bits,
                   writer->Begin({SegmentType::kDensePacked, static_cast<uint8_t>(bits), begin, count, bytes}));
      writer->End();
    } else {
      writer->Add({SegmentType::kDenseInt, 4, begin, count, count * 4}, part.data());
    }
  }
}

void WriteExponents(const RoundPlan& next, FrameWriter* writer) {
  const uint32_t n = static_cast<uint32_t>(next.exponents.size());
  writer->Add({SegmentType::kExponents, 0, 0, n, n}, next.exponents.data());
}

}  // namespace gradwire::dense

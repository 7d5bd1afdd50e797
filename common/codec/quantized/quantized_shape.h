// What encoder and accumulator of the quantized codecs share with readers of updates: how a bucket's runs lie in
// segments.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "common/codec/codec.h"
#include "common/codec/dense/dense_shape.h"
#include "common/codec/frame/run_segments.h"
#include "common/codec/grid/grid_limit.h"
#include "common/codec/quantized/quantizer.h"

namespace gradwire::quantized {

// Immutable.
struct Shape {
  CodecContext context;
  QuantizedSpec spec;
  std::shared_ptr<const Quantizer> quantizer;

  const BucketLayout& layout() const { return *context.layout; }
  auto segments() const {
    return RunSegments(context.layout, [q = quantizer.get()](size_t n) { return q->BytesOf(n); });
  }

  SentLimit sent_limit() const {
    if (!quantizer->sends_magnitudes()) return {};
    return SentLimitOf(context, spec.scheme == QuantizedSpec::Scheme::kFp16 ? kFp16Digits : kAllDigits);
  }

  // The values of a segment that passed CheckSegment. out: s.count.
  absl::Status Decode(const wire::Segment& s, float* out) const {
    return segments().ForEachRun(s, [&](size_t run, const uint8_t* in) {
      const uint32_t n = layout().runs[run].length;
      absl::Status status = quantizer->Decode(in, n, out);
      out += n;
      if (status.ok()) return status;
      return absl::InvalidArgumentError(absl::StrFormat("tensor '%s', elements from %d on: %s",
                                                        context.job->tensors()[layout().runs[run].tensor].name,
                                                        layout().runs[run].offset, std::string(status.message())));
    });
  }

  absl::Status CheckSegment(uint64_t round, const wire::Segment& s) const {
    if (round == 0 || s.type != wire::SegmentType::kQuantized || s.param != 0) {
      return absl::InvalidArgumentError(absl::StrFormat("segment type %d (param %d) does not belong in round %d of %s",
                                                        static_cast<int>(s.type), s.param, round, ToString(spec)));
    }
    const std::optional<uint64_t> bytes = segments().BytesOfRuns(s.begin, s.count);
    if (bytes.has_value() && *bytes == s.bytes) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrFormat(
        "segment of elements [%d, %d + %d) in %d bytes: not whole runs of a bucket with %d elements, at most %d in %s",
        s.begin, s.begin, s.count, s.bytes, layout().elements, dense::kSegmentElements, ToString(spec)));
  }
};

}  // namespace gradwire::quantized

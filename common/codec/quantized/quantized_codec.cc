// See quantized_codec.h. A frame is the quantized runs, in order, several to a segment; the shard decodes them and adds
// them on the grid.
#include "common/codec/quantized/quantized_codec.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/bits/reductions.h"
#include "common/codec/bits/salts.h"
#include "common/codec/dense/dense_shape.h"
#include "common/codec/frame/coverage.h"
#include "common/codec/frame/frame_header.h"
#include "common/codec/grid/grid_sums.h"
#include "common/codec/quantized/quantized_shape.h"

namespace gradwire::quantized {
namespace {

using dense::kSegmentElements;
using wire::FrameWriter;
using wire::Segment;
using wire::SegmentHeader;
using wire::SegmentType;

class QuantizedEncoder final : public Encoder {
 public:
  explicit QuantizedEncoder(const Shape& shape) : shape_(shape) {}

  absl::StatusOr<EncodedFrame> Encode(const FrameIdentity& id, const RoundPlan& plan,
                                      std::span<const RunInput> runs) override {
    wire::FrameWriter writer = BeginPush(id, shape_.layout(), plan);
    if (id.round != 0) {
      const auto segments = shape_.segments();
      segments.ForEachSegment(SegmentType::kQuantized, 0, [&](size_t first, size_t last, const SegmentHeader& segment) {
        uint8_t* out = writer.Begin(segment);
        for (size_t run = first; run < last; ++run) {
          EncodeRun(id, run, runs[run], out);
          out += segments.BytesOfRun(run);
        }
        writer.End();
      });
    }
    return FinishEncoded(&writer, plan);
  }

 private:
  void EncodeRun(const FrameIdentity& id, size_t index, const RunInput& input, uint8_t* out) {
    const Run& run = shape_.layout().runs[index];
    const Quantizer& quantizer = *shape_.quantizer;
    const Rest rest = quantizer.rest();
    const float* const x = rest == Rest::kDropped ? input.gradient : input.pending;
    const uint64_t salt = quantizer.stochastic() ? WorkerSalt(*shape_.context.job, run, id.round, id.draws) : 0;
    quantizer.Encode(rest == Rest::kResidual ? Sendable(x, run.length) : x, run.length, salt, out);
    if (rest == Rest::kMomentum) {
      for (uint32_t i = 0; i < run.length; ++i) input.pending[i] *= shape_.spec.momentum;
    }
    if (rest != Rest::kResidual) return;
    sent_.resize(std::max<size_t>(sent_.size(), run.length));
    quantizer.Decode(out, run.length, sent_.data()).IgnoreError();  // what it wrote itself
    for (uint32_t i = 0; i < run.length; ++i) input.pending[i] -= sent_[i];
  }

  // x[0 .. n) without what lies beyond the limit.
  const float* Sendable(const float* x, uint32_t n) {
    if (LargestMagnitude(x, n) < limit_.from) return x;
    cut_.resize(std::max<size_t>(cut_.size(), n));
    for (uint32_t i = 0; i < n; ++i) cut_[i] = limit_.Cut(x[i]);
    return cut_.data();
  }

  const Shape shape_;
  const SentLimit limit_ = shape_.sent_limit();
  std::vector<float> cut_;
  std::vector<float> sent_;
};

class QuantizedAccumulator final : public Accumulator {
 public:
  explicit QuantizedAccumulator(const Shape& shape) : shape_(shape), sums_(shape.context) {
    values_.resize(std::min<uint64_t>(kSegmentElements, shape.layout().elements));
  }
  static size_t Bytes(const Shape& shape) {
    return GridSums::Bytes(shape.layout()) +
           std::min<uint64_t>(kSegmentElements, shape.layout().elements) * sizeof(float);
  }

  void Open(uint64_t round, const RoundPlan& plan) override {
    round_ = round;
    plan_ = plan;
    sums_.Clear();
  }

  absl::Status Add(const Segment& s) override {
    GW_RETURN_IF_ERROR(shape_.CheckSegment(round_, s));
    GW_RETURN_IF_ERROR(Decode(s));
    GW_RETURN_IF_ERROR(sums_.Check(values_.data(), s.count, [&](size_t i) { return s.begin + i; }));
    sums_.Add(s.begin, values_.data(), s.count, kernels::Sign::kAdd);
    return absl::OkStatus();
  }

  void Remove(const Segment& s) override {
    Decode(s).IgnoreError();  // was added
    sums_.Add(s.begin, values_.data(), s.count, kernels::Sign::kSubtract);
  }

  absl::StatusOr<UpdateFrame> Finish(const FrameIdentity& id, uint32_t contributors) override {
    wire::FrameWriter writer = BeginUpdateFrame(id, shape_.layout(), contributors);
    UpdateFrame update;
    if (contributors != 0 && round_ != 0) {
      const uint64_t elements = shape_.layout().elements;
      update.stats.elements = elements;
      for (uint64_t begin = 0; begin < elements; begin += kSegmentElements) {
        const uint32_t count = static_cast<uint32_t>(std::min<uint64_t>(kSegmentElements, elements - begin));
        // Payloads are 8-byte aligned (WIRE.md), so they may be written as float32.
        uint8_t* out = writer.Begin({SegmentType::kDenseF32, 0, begin, count, count * 4});
        sums_.Means(begin, count, contributors, reinterpret_cast<float*>(out));
        writer.End();
      }
    }
    update.next = plan_;
    update.chunks = writer.Finish();
    return update;
  }

  size_t memory_bytes() const override { return Bytes(shape_); }

 private:
  // The values of a segment that passed CheckSegment.
  absl::Status Decode(const Segment& s) { return shape_.Decode(s, values_.data()); }

  const Shape shape_;
  GridSums sums_;
  std::vector<float> values_;  // of one segment
  uint64_t round_ = 0;
  RoundPlan plan_;
};

class QuantizedCodec final : public Codec {
 public:
  explicit QuantizedCodec(const Shape& shape) : shape_(shape) {}

  bool uses_residual() const override { return shape_.quantizer->rest() != Rest::kDropped; }
  bool sparse() const override { return false; }
  double Density(uint64_t) const override { return 1; }
  uint32_t gradient_limit_bits() const override {
    // Of signs alone the magnitude is not sent.
    return shape_.quantizer->sends_magnitudes() ? GridLimitBits(*shape_.context.job) : Codec::gradient_limit_bits();
  }
  SentLimit sent_limit() const override { return shape_.sent_limit(); }
  RoundPlan InitialPlan() const override { return {}; }
  std::unique_ptr<Encoder> NewEncoder() const override { return std::make_unique<QuantizedEncoder>(shape_); }
  std::unique_ptr<Accumulator> NewAccumulator() const override {
    return std::make_unique<QuantizedAccumulator>(shape_);
  }
  size_t accumulator_bytes() const override { return QuantizedAccumulator::Bytes(shape_); }

  absl::Status CheckComplete(uint64_t round, const RoundPlan&, std::span<const SegmentHeader> segments) const override {
    return CheckCoverage(shape_.layout(), round, SegmentType::kQuantized, segments);
  }

  absl::Status Return(const EncodedFrame& frame, const std::vector<uint32_t>* positions,
                      std::span<float* const> residual) const override {
    // Nothing is deferred; signs alone, and momentum, are no gradient that could be sent again.
    const bool values = shape_.quantizer->rest() == Rest::kResidual || shape_.quantizer->stochastic();
    if (positions != nullptr || !values) return absl::OkStatus();
    GW_ASSIGN_OR_RETURN(const std::vector<wire::Chunk> chunks, wire::ParseFrame(frame.chunks));
    std::vector<float> sent;
    for (const wire::Chunk& chunk : chunks) {
      for (const Segment& s : chunk.segments) {
        if (s.type != SegmentType::kQuantized) continue;
        GW_RETURN_IF_ERROR(shape_.segments().ForEachRun(s, [&](size_t run, const uint8_t* in) {
          const uint32_t n = shape_.layout().runs[run].length;
          sent.resize(std::max<size_t>(sent.size(), n));
          GW_RETURN_IF_ERROR(shape_.quantizer->Decode(in, n, sent.data()));
          for (uint32_t i = 0; i < n; ++i) residual[run][i] += sent[i];
          return absl::OkStatus();
        }));
      }
    }
    return absl::OkStatus();
  }

 private:
  const Shape shape_;
};

}  // namespace

std::unique_ptr<Codec> MakeQuantizedCodec(const CodecContext& context, const QuantizedSpec& spec) {
  return std::make_unique<QuantizedCodec>(Shape{context, spec, MakeQuantizer(spec)});
}

}  // namespace gradwire::quantized

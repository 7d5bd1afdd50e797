// Dense codecs: see dense_codec.h.
#include "common/codec/dense/dense_codec.h"

#include <cstring>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/dense/dense_accumulator.h"
#include "common/codec/dense/dense_shape.h"
#include "common/codec/dense/device_accumulator.h"
#include "common/codec/dense/device_encoder.h"
#include "common/codec/frame/frame_header.h"
#include "common/codec/frame/run_pieces.h"
#include "kernels/math/fixed_point.h"

namespace gradwire {
namespace {

using dense::DenseShape;
using dense::kSegmentElements;
using wire::FrameWriter;
using wire::Segment;
using wire::SegmentHeader;
using wire::SegmentType;

class DenseEncoder final : public Encoder {
 public:
  explicit DenseEncoder(const DenseShape& shape) : shape_(shape) {}

  absl::StatusOr<EncodedFrame> Encode(const FrameIdentity& id, const RoundPlan& plan,
                                      std::span<const RunInput> runs) override {
    const BucketLayout& layout = shape_.layout();
    wire::FrameWriter writer = BeginPush(id, layout, plan);
    if (shape_.fixed()) AddRanges(runs, &writer);
    if (shape_.CarriesValues(id.round)) {
      for (uint64_t begin = 0; begin < layout.elements; begin += kSegmentElements) {
        const uint32_t count = static_cast<uint32_t>(std::min<uint64_t>(kSegmentElements, layout.elements - begin));
        const uint32_t bytes = count * static_cast<uint32_t>(shape_.width());
        uint8_t* out = writer.Begin({shape_.type(), shape_.param(), begin, count, bytes});
        ForEachRunPiece(layout, begin, count, [&](size_t run, uint64_t offset, uint64_t n, uint64_t position) {
          EncodePiece(runs[run], plan, run, offset, n, out + (position - begin) * shape_.width());
        });
        writer.End();
      }
    }
    return FinishEncoded(&writer, plan);
  }

 private:
  void AddRanges(std::span<const RunInput> runs, FrameWriter* writer) const {
    std::vector<int8_t> ranges(runs.size());
    for (size_t i = 0; i < runs.size(); ++i) {
      ranges[i] =
          static_cast<int8_t>(shape_.backend().RangeOf(runs[i].pending, shape_.layout().runs[i].length, nullptr));
    }
    const uint32_t n = static_cast<uint32_t>(runs.size());
    writer->Add({SegmentType::kRanges, 0, 0, n, n}, ranges.data());
  }

  void EncodePiece(const RunInput& run, const RoundPlan& plan, size_t index, uint64_t offset, uint64_t n,
                   uint8_t* out) const {
    if (shape_.fixed() && plan.exponents[index] == kUncalibrated) {
      std::memset(out, 0, n * static_cast<size_t>(shape_.width()));  // nobody took part in round 0: the ranges go first
    } else if (shape_.fixed()) {
      shape_.backend().Quantize(run.pending + offset, n, plan.exponents[index], shape_.limit(), shape_.width(), out,
                                nullptr);
    } else if (shape_.width() == 2) {
      shape_.backend().SplitBf16(run.pending + offset, n, shape_.sent_limit().to, out, nullptr);
    } else {
      std::memcpy(out, run.gradient + offset, n * sizeof(float));
    }
  }

  DenseShape shape_;
};

class DenseCodec final : public Codec {
 public:
  DenseCodec(const CodecContext& context, const DenseSpec& spec) : shape_{context, spec} {}

  bool uses_residual() const override { return shape_.spec.values != DenseSpec::Values::kFp32; }
  bool sparse() const override { return false; }
  double Density(uint64_t) const override { return 1; }
  uint32_t gradient_limit_bits() const override {
    return shape_.fixed() ? Codec::gradient_limit_bits() : shape_.limit_bits();
  }

  SentLimit sent_limit() const override { return shape_.fixed() ? SentLimit() : shape_.sent_limit(); }

  RoundPlan InitialPlan() const override {
    RoundPlan plan;
    if (shape_.fixed()) plan.exponents.assign(shape_.layout().runs.size(), kUncalibrated);
    return plan;
  }

  std::unique_ptr<Encoder> NewEncoder() const override { return std::make_unique<DenseEncoder>(shape_); }
  std::unique_ptr<Accumulator> NewAccumulator() const override { return dense::MakeAccumulator(shape_); }
  size_t accumulator_bytes() const override { return dense::AccumulatorBytes(shape_); }

  DeviceNeeds device_needs() const override { return dense::NeedsOnDevice(shape_); }
  absl::StatusOr<std::unique_ptr<Accumulator>> NewDeviceAccumulator(
      kernels::cuda::DeviceBucket* bucket) const override {
    return dense::MakeDeviceAccumulator(shape_, bucket);
  }
  absl::StatusOr<std::unique_ptr<Encoder>> NewDeviceEncoder(kernels::cuda::DeviceBucket* bucket) const override {
    return dense::MakeDeviceEncoder(shape_, bucket);
  }

  absl::Status CheckComplete(uint64_t round, const RoundPlan&, std::span<const SegmentHeader> segments) const override {
    size_t next = 0;
    const auto take = [&](SegmentType type, uint64_t begin) -> const SegmentHeader* {
      if (next == segments.size() || segments[next].type != type || segments[next].begin != begin) return nullptr;
      return &segments[next++];
    };
    if (take(SegmentType::kLearningRates, 0) == nullptr) return Incomplete("does not begin with learning rates");
    if (shape_.fixed()) {
      const SegmentHeader* ranges = take(SegmentType::kRanges, 0);
      if (ranges == nullptr || ranges->count != shape_.layout().runs.size()) return Incomplete("lacks ranges");
    }
    for (uint64_t covered = 0; shape_.CarriesValues(round) && covered < shape_.layout().elements;) {
      const SegmentHeader* s = take(shape_.type(), covered);
      if (s == nullptr || s->count == 0) {
        return Incomplete(absl::StrFormat("covers %d of %d elements", covered, shape_.layout().elements));
      }
      covered += s->count;
    }
    if (next != segments.size()) return Incomplete(absl::StrFormat("has %d segments too many", segments.size() - next));
    return absl::OkStatus();
  }

  absl::Status Return(const EncodedFrame& frame, const std::vector<uint32_t>* positions,
                      std::span<float* const> residual) const override {
    if (positions != nullptr) return absl::OkStatus();  // dense frames defer nothing
    GW_ASSIGN_OR_RETURN(const std::vector<wire::Chunk> chunks, wire::ParseFrame(frame.chunks));
    for (const wire::Chunk& chunk : chunks) {
      for (const Segment& s : chunk.segments) {
        if (s.type != shape_.type()) continue;
        ForEachRunPiece(shape_.layout(), s.begin, s.count, [&](size_t run, uint64_t offset, uint64_t n, uint64_t at) {
          const uint8_t* values = s.data + (at - s.begin) * static_cast<uint64_t>(shape_.width());
          float* out = residual[run] + offset;
          if (shape_.fixed() && frame.plan.exponents[run] == kUncalibrated) {
            return;  // only zeros were sent
          } else if (shape_.fixed()) {
            shape_.backend().Dequantize(values, shape_.width(), n, frame.plan.exponents[run], out, nullptr);
          } else if (shape_.width() == 2) {
            shape_.backend().AddBf16(values, n, out, nullptr);
          } else {
            AddFloats(values, n, out);
          }
        });
      }
    }
    return absl::OkStatus();
  }

 private:
  // `values`: float32 at any address.
  static void AddFloats(const uint8_t* values, uint64_t n, float* out) {
    for (uint64_t i = 0; i < n; ++i) {
      float value;
      std::memcpy(&value, values + 4 * i, 4);
      out[i] += value;
    }
  }

  absl::Status Incomplete(std::string_view what) const {
    return absl::InvalidArgumentError(absl::StrFormat("frame of bucket %d on shard %d %s", shape_.layout().bucket,
                                                      shape_.layout().shard, std::string(what)));
  }

  DenseShape shape_;
};

}  // namespace

std::unique_ptr<Codec> MakeDenseCodec(const CodecContext& context, const DenseSpec& spec) {
  return std::make_unique<DenseCodec>(context, spec);
}

}  // namespace gradwire

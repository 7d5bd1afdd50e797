// Dense codecs: see dense_codec.h.
#include "common/codec/dense_codec.h"

#include <cstring>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/dense_shape.h"
#include "common/codec/device/dense_accumulator.h"
#include "common/codec/device/device_runs.h"
#include "common/codec/device/encoders.h"
#include "common/codec/frame_header.h"
#include "common/codec/run_pieces.h"
#include "kernels/math/fixed_point.h"

namespace gradwire {
namespace {

using dense::DenseShape;
using dense::kSegmentElements;
using kernels::Sign;
using wire::FrameWriter;
using wire::Segment;
using wire::SegmentHeader;
using wire::SegmentType;

constexpr uint64_t kFreshElements = 4096;  // of an accumulator that are first stored, or cleared, at once

template <typename T>
int32_t LoadInteger(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

template <typename T>
bool AllWithin(const uint8_t* values, size_t n, int32_t limit) {
  int32_t over = 0;
  for (size_t i = 0; i < n; ++i) {
    const int32_t v = LoadInteger<T>(values + sizeof(T) * i);
    over |= static_cast<int32_t>(v > limit) | static_cast<int32_t>(v < -limit);
  }
  return over == 0;
}

class DenseEncoder final : public Encoder {
 public:
  explicit DenseEncoder(const DenseShape& shape) : shape_(shape) {}

  absl::StatusOr<EncodedFrame> Encode(const FrameIdentity& id, const RoundPlan& plan,
                                      std::span<const RunInput> runs) override {
    const BucketLayout& layout = shape_.layout();
    wire::FrameHeader header = HeaderFor(id, wire::FrameKind::kPush, layout.shape_digest);
    header.plan_digest = plan.Digest();
    FrameWriter writer(header);
    dense::AddLearningRates(id.learning_rates, &writer);
    if (shape_.fixed()) AddRanges(runs, &writer);
    if (id.round != 0) {
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
    EncodedFrame frame;
    frame.chunks = writer.Finish();
    frame.bytes = TotalSize(frame.chunks);
    frame.plan = plan;
    return frame;
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
      shape_.backend().SplitBf16(run.pending + offset, n, out, nullptr);
    } else {
      std::memcpy(out, run.gradient + offset, n * sizeof(float));
    }
  }

  DenseShape shape_;
};

class DenseAccumulator final : public Accumulator {
 public:
  explicit DenseAccumulator(const DenseShape& shape)
      : shape_(shape),
        fresh_((shape.layout().elements + kFreshElements - 1) / kFreshElements),
        ranges_(shape.fixed() ? shape.layout().runs.size() : 0) {
    if (shape.fixed()) {
      integers_.resize(shape.layout().elements);
    } else {
      grid_.resize(shape.layout().elements);
    }
  }

  void Open(uint64_t round, const RoundPlan& plan) override {
    round_ = round;
    plan_ = plan;
    std::fill(fresh_.begin(), fresh_.end(), true);
    ranges_.Clear();
  }

  absl::Status Add(const Segment& s) override {
    if (s.type == SegmentType::kRanges && shape_.fixed()) {
      GW_RETURN_IF_ERROR(ranges_.Check(s));
      ranges_.Merge(s, Sign::kAdd);
      return absl::OkStatus();
    }
    GW_RETURN_IF_ERROR(CheckDense(s));
    Merge<Sign::kAdd>(s);
    return absl::OkStatus();
  }

  void Remove(const Segment& s) override {
    if (s.type == SegmentType::kRanges) {
      ranges_.Merge(s, Sign::kSubtract);
    } else {
      Merge<Sign::kSubtract>(s);
    }
  }

  absl::StatusOr<UpdateFrame> Finish(const FrameIdentity& id, uint32_t contributors) override {
    wire::FrameHeader header = HeaderFor(id, wire::FrameKind::kUpdate, shape_.layout().shape_digest);
    header.contributors = contributors;
    FrameWriter writer(header);
    dense::AddLearningRates(id.learning_rates, &writer);
    UpdateFrame update;
    if (contributors != 0 && round_ != 0) {
      for (size_t block = 0; block < fresh_.size(); ++block) ClearFresh(block);
      update.stats.elements = shape_.layout().elements;
      if (shape_.fixed()) {
        dense::WriteSums(integers_, &writer);
      } else {
        WriteMeans(contributors, &writer);
      }
    }
    update.next = shape_.NextPlan(plan_, ranges_);
    if (shape_.fixed()) dense::WriteExponents(update.next, &writer);
    update.chunks = writer.Finish();
    return update;
  }

  size_t memory_bytes() const override {
    return grid_.size() * 8 + integers_.size() * 4 + fresh_.size() + ranges_.memory_bytes();
  }

 private:
  absl::Status CheckDense(const Segment& s) const {
    GW_RETURN_IF_ERROR(shape_.CheckSegment(round_, s));
    if (shape_.fixed()) return CheckLimit(s);
    const int64_t bad = shape_.backend().FindOutOfGrid(s.data, shape_.width(), s.count, nullptr);
    if (bad < 0) return absl::OkStatus();
    return OutOfGridError(s, static_cast<uint64_t>(bad));
  }

  // Sums stay in range only if every contribution keeps to its share (IntegerLimit).
  absl::Status CheckLimit(const Segment& s) const {
    const int32_t limit = shape_.limit();
    const auto integer = [&s, width = shape_.width()](size_t i) {
      return width == 4 ? LoadInteger<int32_t>(s.data + 4 * i) : LoadInteger<int16_t>(s.data + 2 * i);
    };
    // Without an early exit the compiler vectorises this; the culprit is looked for only if there is one.
    const bool within =
        shape_.width() == 4 ? AllWithin<int32_t>(s.data, s.count, limit) : AllWithin<int16_t>(s.data, s.count, limit);
    if (within) return absl::OkStatus();
    uint32_t i = 0;
    while (integer(i) <= limit && integer(i) >= -limit) ++i;
    return shape_.OverLimit(s.begin + i, integer(i));
  }

  absl::Status OutOfGridError(const Segment& s, uint64_t index) const {
    float value = 0;
    if (shape_.width() == 4) {
      std::memcpy(&value, s.data + 4 * index, 4);
    } else {
      uint16_t bits;
      std::memcpy(&bits, s.data + 2 * index, sizeof(bits));
      value = kernels::Bf16ToFloat(bits);
    }
    return shape_.OutOfGrid(s.begin + index, value);
  }

  // Block by block: what comes first to a fresh one is stored there, without clearing and reading it.
  template <Sign sign>
  void Merge(const Segment& s) {
    const uint64_t end = s.begin + s.count;
    for (uint64_t begin = s.begin, next = 0; begin < end; begin = next) {
      const uint64_t block = begin / kFreshElements;
      const uint64_t block_end = std::min((block + 1) * kFreshElements, shape_.layout().elements);
      next = std::min(block_end, end);
      const uint8_t* values = s.data + (begin - s.begin) * static_cast<uint64_t>(shape_.width());
      const bool whole = begin == block * kFreshElements && next == block_end;
      if (sign == Sign::kAdd && whole && fresh_[block]) {
        fresh_[block] = false;
        Assign(begin, values, next - begin);
        continue;
      }
      ClearFresh(block);
      if (shape_.fixed()) {
        shape_.backend().AddIntegers(integers_.data() + begin, values, shape_.width(), next - begin, sign, nullptr);
      } else {
        shape_.backend().AddFloats(grid_.data() + begin, values, shape_.width(), next - begin, sign, nullptr);
      }
    }
  }

  void Assign(uint64_t begin, const uint8_t* values, uint64_t n) {
    if (shape_.fixed()) {
      shape_.backend().AssignIntegers(integers_.data() + begin, values, shape_.width(), n, nullptr);
    } else {
      shape_.backend().AssignFloats(grid_.data() + begin, values, shape_.width(), n, nullptr);
    }
  }

  void ClearFresh(uint64_t block) {
    if (!fresh_[block]) return;
    fresh_[block] = false;
    const uint64_t begin = block * kFreshElements;
    const uint64_t n = std::min<uint64_t>(kFreshElements, shape_.layout().elements - begin);
    if (shape_.fixed()) {
      std::fill_n(integers_.begin() + static_cast<ptrdiff_t>(begin), n, 0);
    } else {
      std::fill_n(grid_.begin() + static_cast<ptrdiff_t>(begin), n, 0);
    }
  }

  void WriteMeans(uint32_t contributors, FrameWriter* writer) const {
    for (uint64_t begin = 0; begin < grid_.size(); begin += kSegmentElements) {
      const uint32_t count = static_cast<uint32_t>(std::min<uint64_t>(kSegmentElements, grid_.size() - begin));
      uint8_t* out = writer->Begin({SegmentType::kDenseF32, 0, begin, count, count * 4});
      // Payloads are 8-byte aligned (WIRE.md), so they may be written as float32.
      shape_.backend().GridToMean(grid_.data() + begin, count, contributors, reinterpret_cast<float*>(out), nullptr);
      writer->End();
    }
  }

  DenseShape shape_;
  uint64_t round_ = 0;
  RoundPlan plan_;
  std::vector<int64_t> grid_;      // fp32, bf16: sums in units of 2^-kGridBits
  std::vector<int32_t> integers_;  // fixed: sums
  std::vector<bool> fresh_;        // per block of kFreshElements: nothing was added since Open; what is in it is old
  RangeHistogram ranges_;
};

class DenseCodec final : public Codec {
 public:
  DenseCodec(const CodecContext& context, const DenseSpec& spec) : shape_{context, spec} {}

  bool uses_residual() const override { return shape_.spec.values != DenseSpec::Values::kFp32; }
  bool sparse() const override { return false; }
  double Density(uint64_t) const override { return 1; }

  RoundPlan InitialPlan() const override {
    RoundPlan plan;
    if (shape_.fixed()) plan.exponents.assign(shape_.layout().runs.size(), kUncalibrated);
    return plan;
  }

  std::unique_ptr<Encoder> NewEncoder() const override { return std::make_unique<DenseEncoder>(shape_); }
  std::unique_ptr<Accumulator> NewAccumulator() const override { return std::make_unique<DenseAccumulator>(shape_); }
  size_t accumulator_bytes() const override {
    return shape_.layout().elements * (shape_.fixed() ? 4 : 8) + shape_.layout().elements / kFreshElements + 1 +
           (shape_.fixed() ? shape_.layout().runs.size() * 128 : 0);
  }

  DeviceNeeds device_needs() const override { return dense::NeedsOnDevice(shape_); }
  absl::StatusOr<std::unique_ptr<Accumulator>> NewDeviceAccumulator(
      kernels::cuda::DeviceBucket* bucket) const override {
    return dense::MakeDeviceAccumulator(shape_, bucket);
  }
  absl::StatusOr<std::unique_ptr<Encoder>> NewDeviceEncoder(kernels::cuda::DeviceBucket* bucket) const override {
    return dense::MakeDeviceEncoder(shape_, bucket);
  }
  uint64_t device_encoder_bytes() const override { return DeviceRuns::Bytes(shape_.layout()); }

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
    for (uint64_t covered = 0; round != 0 && covered < shape_.layout().elements;) {
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
    if (!uses_residual() || positions != nullptr) return absl::OkStatus();  // nothing to give back, nothing deferred
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
          } else {
            shape_.backend().AddBf16(values, n, out, nullptr);
          }
        });
      }
    }
    return absl::OkStatus();
  }

 private:
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

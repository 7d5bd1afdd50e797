// See homomorphic_codec.h. A push is ranges and levels; the shard adds levels as integers, and the update frame holds
// the sums and the ranges of the next round. Only who reads an update frame turns sums into values.
#include "common/codec/homomorphic/homomorphic_codec.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/large_array.h"
#include "common/base/status_macros.h"
#include "common/codec/bits/index_code.h"
#include "common/codec/bits/level_bits.h"
#include "common/codec/bits/salts.h"
#include "common/codec/dense/dense_shape.h"
#include "common/codec/frame/coverage.h"
#include "common/codec/frame/frame_header.h"
#include "common/codec/frame/run_segments.h"
#include "common/codec/plan/ranges.h"

namespace gradwire::homomorphic {
namespace {

using wire::FrameWriter;
using wire::Segment;
using wire::SegmentHeader;
using wire::SegmentType;

// Sums that need more bits would make update frames longer than the server has reserved for them.
constexpr int kMostSumBits = 20;

// What encoder, accumulators and codec share. Immutable.
struct Shape {
  CodecContext context;
  HomomorphicSpec spec;
  std::shared_ptr<const Levels> levels;
  std::vector<uint64_t> position_begin;  // of each run, among the positions that travel; then their number

  Shape(const CodecContext& c, const HomomorphicSpec& s) : context(c), spec(s), levels(MakeLevels(s)) {
    position_begin.push_back(0);
    for (const Run& run : layout().runs)
      position_begin.push_back(position_begin.back() + levels->PositionsOf(run.length));
  }
  const Job& job() const { return *context.job; }
  const BucketLayout& layout() const { return *context.layout; }
  uint64_t positions() const { return position_begin.back(); }
  size_t PositionsOf(size_t run) const { return position_begin[run + 1] - position_begin[run]; }
  auto segments() const {
    return RunSegments(context.layout,
                       [l = levels.get()](size_t n) { return LevelBytes(l->PositionsOf(n), l->bits()); });
  }

  absl::Status CheckLevels(uint64_t round, const Segment& s) const {
    if (round == 0 || s.type != SegmentType::kLevels || s.param != levels->bits()) {
      return absl::InvalidArgumentError(absl::StrFormat("segment type %d (param %d) does not belong in round %d of %s",
                                                        static_cast<int>(s.type), s.param, round, ToString(spec)));
    }
    const std::optional<uint64_t> bytes = segments().BytesOfRuns(s.begin, s.count);
    if (bytes.has_value() && *bytes == s.bytes) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrFormat(
        "segment of elements [%d, %d + %d) in %d bytes: not whole runs of a bucket with %d elements in %s", s.begin,
        s.begin, s.count, s.bytes, layout().elements, ToString(spec)));
  }

  // The levels of a run.
  absl::Status Unpack(size_t run, const uint8_t* in, uint8_t* out) const {
    if (UnpackLevels(in, PositionsOf(run), levels->bits(), out) && levels->Valid(out, PositionsOf(run))) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(
        absl::StrFormat("run %d: a level or padding that %s does not have", run, ToString(spec)));
  }

  // The sums of one worker.
  void ValuesOf(size_t run, const uint8_t* of_run, uint64_t round, const RoundPlan& plan, std::vector<int32_t>* sums,
                Scratch* scratch, float* out) const {
    sums->assign(PositionsOf(run), 0);
    levels->Add(of_run, PositionsOf(run), 1, sums->data());
    const Run& r = layout().runs[run];
    levels->Means(sums->data(), r.length, plan.exponents[run], SharedSalt(job(), r, round), 1, scratch, out);
  }
};

class HomomorphicEncoder final : public Encoder {
 public:
  explicit HomomorphicEncoder(const std::shared_ptr<const Shape>& shape) : shape_(*shape), owned_(shape) {}

  absl::StatusOr<EncodedFrame> Encode(const FrameIdentity& id, const RoundPlan& plan,
                                      std::span<const RunInput> runs) override {
    FrameWriter writer = BeginPush(id, shape_.layout(), plan);
    std::vector<int8_t> ranges(runs.size());
    for (size_t run = 0; run < runs.size(); ++run) {
      const uint32_t length = shape_.layout().runs[run].length;
      ranges[run] = static_cast<int8_t>(shape_.levels->RangeOfRun(runs[run].pending, length));
    }
    const uint32_t count = static_cast<uint32_t>(ranges.size());
    writer.Add({SegmentType::kRanges, 0, 0, count, count}, ranges.data());
    if (id.round != 0) {
      const auto segments = shape_.segments();
      const auto bits = static_cast<uint8_t>(shape_.levels->bits());
      segments.ForEachSegment(SegmentType::kLevels, bits, [&](size_t first, size_t last, const SegmentHeader& segment) {
        uint8_t* out = writer.Begin(segment);
        for (size_t run = first; run < last; ++run) {
          EncodeRun(id, plan, run, runs[run].pending, out);
          out += segments.BytesOfRun(run);
        }
        writer.End();
      });
    }
    return FinishEncoded(&writer, plan);
  }

 private:
  // `x`: pending; on return, what was not sent.
  void EncodeRun(const FrameIdentity& id, const RoundPlan& plan, size_t index, float* x, uint8_t* out) {
    const Run& run = shape_.layout().runs[index];
    const size_t positions = shape_.PositionsOf(index);
    const int range = plan.exponents[index];
    levels_.assign(positions, 0);
    if (range > kLeastRange) {
      shape_.levels->Encode(x, run.length, range, SharedSalt(shape_.job(), run, id.round),
                            WorkerSalt(shape_.job(), run, id.round, id.draws), &scratch_, levels_.data());
      if (shape_.levels->keeps_rest()) {
        sent_.resize(std::max<size_t>(sent_.size(), run.length));
        shape_.ValuesOf(index, levels_.data(), id.round, plan, &sums_, &scratch_, sent_.data());
        for (uint32_t i = 0; i < run.length; ++i) x[i] -= sent_[i];
      } else {
        const float limit = static_cast<float>(MagnitudeOf(range));
        for (uint32_t i = 0; i < run.length; ++i) x[i] -= std::min(std::max(x[i], -limit), limit);
      }
    }
    PackLevels(levels_.data(), positions, shape_.levels->bits(), out);
  }

  const Shape& shape_;
  const std::shared_ptr<const Shape> owned_;
  std::vector<uint8_t> levels_;
  std::vector<int32_t> sums_;
  std::vector<float> sent_;
  Scratch scratch_;
};

class HomomorphicAccumulator final : public Accumulator {
 public:
  explicit HomomorphicAccumulator(const std::shared_ptr<const Shape>& shape)
      : shape_(*shape),
        owned_(shape),
        sums_(shape->positions()),
        ranges_(shape->layout().runs.size(), kLeastRange, kLargestRange) {
    levels_.resize(MostSegmentPositions(*shape));
  }
  static size_t Bytes(const Shape& shape) {
    return shape.positions() * sizeof(int32_t) + MostSegmentPositions(shape) +
           RangeHistogram(1, kLeastRange, kLargestRange).memory_bytes() * shape.layout().runs.size();
  }

  void Open(uint64_t round, const RoundPlan& plan) override {
    round_ = round;
    plan_ = plan;
    std::fill(sums_.begin(), sums_.end(), 0);
    ranges_.Clear();
  }

  absl::Status Add(const Segment& s) override {
    if (s.type == SegmentType::kRanges) {
      GW_RETURN_IF_ERROR(ranges_.Check(s));
      ranges_.Merge(s, kernels::Sign::kAdd);
      return absl::OkStatus();
    }
    GW_RETURN_IF_ERROR(shape_.CheckLevels(round_, s));
    GW_RETURN_IF_ERROR(Unpack(s));
    Merge(s, 1);
    return absl::OkStatus();
  }

  void Remove(const Segment& s) override {
    if (s.type == SegmentType::kRanges) return ranges_.Merge(s, kernels::Sign::kSubtract);
    Unpack(s).IgnoreError();  // was added
    Merge(s, -1);
  }

  absl::StatusOr<UpdateFrame> Finish(const FrameIdentity& id, uint32_t contributors) override {
    FrameWriter writer = BeginUpdateFrame(id, shape_.layout(), contributors);
    UpdateFrame update;
    if (contributors != 0 && round_ != 0) {
      update.stats.elements = shape_.layout().elements;
      shape_.segments().ForEachSegment(SegmentType::kLevelSums, 0, [&](size_t first, size_t last, SegmentHeader s) {
        const std::span<const int32_t> sums = std::span(sums_).subspan(
            shape_.position_begin[first], shape_.position_begin[last] - shape_.position_begin[first]);
        const int bits = BitsFor(sums);
        s.param = static_cast<uint8_t>(bits);
        s.bytes = static_cast<uint32_t>(PackedBytes(sums.size(), bits));
        PackIntegers(sums, bits, writer.Begin(s));
        writer.End();
      });
    }
    update.next = plan_;
    for (size_t run = 0; run < update.next.exponents.size(); ++run) {
      const int range = ranges_.Max(run);
      // Nothing anywhere: following it down would hold back all of the first gradient that comes.
      if (range == kLeastRange && plan_.exponents[run] != kUncalibrated && shape_.levels->keeps_zeros()) continue;
      // Magnitudes are ranges themselves: a limit of 1, nothing left for growth, which the residual takes.
      if (range >= kLeastRange) update.next.exponents[run] = NextExponent(plan_.exponents[run], range, 1, 0);
    }
    dense::WriteExponents(update.next, &writer);
    update.chunks = writer.Finish();
    return update;
  }

  size_t memory_bytes() const override { return Bytes(shape_); }

 private:
  static size_t MostSegmentPositions(const Shape& shape) {
    return std::min<uint64_t>(shape.positions(), 2 * uint64_t{dense::kSegmentElements});
  }

  // The levels of a segment that passed CheckLevels.
  absl::Status Unpack(const Segment& s) {
    uint8_t* out = levels_.data();
    return shape_.segments().ForEachRun(s, [&](size_t run, const uint8_t* in) {
      uint8_t* const at = out;
      out += shape_.PositionsOf(run);
      return shape_.Unpack(run, in, at);
    });
  }

  void Merge(const Segment& s, int sign) {
    const size_t first = RunOf(shape_.layout(), s.begin);
    const size_t last = RunOf(shape_.layout(), s.begin + s.count - 1);
    const uint64_t begin = shape_.position_begin[first];
    shape_.levels->Add(levels_.data(), shape_.position_begin[last + 1] - begin, sign, sums_.data() + begin);
  }

  const Shape& shape_;
  const std::shared_ptr<const Shape> owned_;
  LargeArray<int32_t> sums_;
  std::vector<uint8_t> levels_;  // of one segment
  RangeHistogram ranges_;
  uint64_t round_ = 0;
  RoundPlan plan_;
};

class HomomorphicCodec final : public Codec {
 public:
  explicit HomomorphicCodec(std::shared_ptr<const Shape> shape) : shape_(std::move(shape)) {}

  bool uses_residual() const override { return true; }
  bool sparse() const override { return false; }
  double Density(uint64_t) const override { return 1; }
  RoundPlan InitialPlan() const override {
    RoundPlan plan;
    plan.exponents.assign(shape_->layout().runs.size(), kUncalibrated);
    return plan;
  }
  std::unique_ptr<Encoder> NewEncoder() const override { return std::make_unique<HomomorphicEncoder>(shape_); }
  std::unique_ptr<Accumulator> NewAccumulator() const override {
    return std::make_unique<HomomorphicAccumulator>(shape_);
  }
  size_t accumulator_bytes() const override { return HomomorphicAccumulator::Bytes(*shape_); }

  absl::Status CheckComplete(uint64_t round, const RoundPlan&, std::span<const SegmentHeader> segments) const override {
    const size_t runs = shape_->layout().runs.size();
    if (segments.size() < 2 || segments[1].type != SegmentType::kRanges || segments[1].begin != 0 ||
        segments[1].count != runs) {
      return absl::InvalidArgumentError(absl::StrFormat("frame of bucket %d on shard %d lacks the ranges of %d runs",
                                                        shape_->layout().bucket, shape_->layout().shard, runs));
    }
    std::vector<SegmentHeader> others(segments.begin(), segments.end());
    others.erase(others.begin() + 1);
    return CheckCoverage(shape_->layout(), round, SegmentType::kLevels, others);
  }

  absl::Status Return(const EncodedFrame& frame, const std::vector<uint32_t>* positions,
                      std::span<float* const> residual) const override {
    if (positions != nullptr) return absl::OkStatus();  // nothing is deferred
    GW_ASSIGN_OR_RETURN(const std::vector<wire::Chunk> chunks, wire::ParseFrame(frame.chunks));
    std::vector<uint8_t> levels;
    std::vector<int32_t> sums;
    std::vector<float> sent;
    Scratch scratch;
    for (const wire::Chunk& chunk : chunks) {
      for (const Segment& s : chunk.segments) {
        if (s.type != SegmentType::kLevels) continue;
        GW_RETURN_IF_ERROR(shape_->segments().ForEachRun(s, [&](size_t run, const uint8_t* in) {
          if (frame.plan.exponents[run] <= kLeastRange) return absl::OkStatus();  // nothing was sent
          const uint32_t n = shape_->layout().runs[run].length;
          levels.resize(std::max(levels.size(), shape_->PositionsOf(run)));
          sent.resize(std::max<size_t>(sent.size(), n));
          GW_RETURN_IF_ERROR(shape_->Unpack(run, in, levels.data()));
          shape_->ValuesOf(run, levels.data(), chunk.header.round, frame.plan, &sums, &scratch, sent.data());
          for (uint32_t i = 0; i < n; ++i) residual[run][i] += sent[i];
          return absl::OkStatus();
        }));
      }
    }
    return absl::OkStatus();
  }

 private:
  const std::shared_ptr<const Shape> shape_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Codec>> MakeHomomorphicCodec(const CodecContext& context, const HomomorphicSpec& spec) {
  auto shape = std::make_shared<const Shape>(context, spec);
  const int64_t largest = int64_t{shape->levels->LargestInteger()} * context.job->spec().max_workers();
  if (2 * largest >= int64_t{1} << kMostSumBits) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "the sums of %s from %d workers can reach %d, which takes more than %d bits; lower max_workers, bits or "
        "granularity",
        ToString(spec), context.job->spec().max_workers(), largest, kMostSumBits));
  }
  return std::make_unique<HomomorphicCodec>(std::move(shape));
}

MeansReader::MeansReader(const Job* job, const BucketLayout* layout, const HomomorphicSpec& spec)
    : job_(*job), layout_(*layout), levels_(MakeLevels(spec)) {}

absl::Status MeansReader::Read(const Segment& s, uint64_t round, std::span<const int8_t> exponents,
                               uint32_t contributors, float* out) {
  // As many positions as bytes, to see that these are whole runs.
  const auto positions = [this](size_t n) { return levels_->PositionsOf(n); };
  const std::optional<uint64_t> count = RunSegments(&layout_, positions).BytesOfRuns(s.begin, s.count);
  if (!count.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("sums of elements [%d, %d + %d): not whole runs", s.begin, s.begin, s.count));
  }
  sums_.resize(std::max<size_t>(sums_.size(), *count));
  GW_RETURN_IF_ERROR(UnpackIntegers(s.payload(), s.param, *count, sums_.data()));
  const int32_t* sums = sums_.data();
  for (size_t run = RunOf(layout_, s.begin); layout_.run_begin[run] < s.begin + s.count; ++run) {
    const Run& r = layout_.runs[run];
    if (exponents[run] > kLeastRange) {
      levels_->Means(sums, r.length, exponents[run], SharedSalt(job_, r, round), contributors, &scratch_, out);
    } else {
      std::fill(out, out + r.length, 0.0f);
    }
    sums += levels_->PositionsOf(r.length);
    out += r.length;
  }
  return absl::OkStatus();
}

}  // namespace gradwire::homomorphic

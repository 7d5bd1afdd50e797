// See sparse_codec.h. What is chosen leaves the residual as values of the wire's format; the shard adds them on the
// grid and counts who sent each position, so the update frame holds the union.
#include "common/codec/sparse/sparse_codec.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/bits/salts.h"
#include "common/codec/dense/dense_shape.h"
#include "common/codec/frame/coverage.h"
#include "common/codec/frame/frame_header.h"
#include "common/codec/frame/run_pieces.h"
#include "common/codec/sparse/agreed.h"
#include "common/codec/sparse/sparse_segment.h"
#include "common/codec/sparse/sums.h"
#include "kernels/math/half.h"
#include "kernels/math/select.h"

namespace gradwire::sparse {
namespace {

using Choice = SparseSpec::Choice;
using wire::FrameWriter;
using wire::Segment;
using wire::SegmentHeader;
using wire::SegmentType;

// Elements of a writer's segment: enough that headers hardly count, few enough that a receiver has it in its cache.
constexpr uint32_t kLeastSegmentElements = 65536;
constexpr double kPairsPerSegment = 4096;
constexpr float kHalfOverflow = 65520.0f;  // from here on the nearest binary16 would be infinity

// What encoder, accumulator and codec share. Immutable.
struct Shape {
  CodecContext context;
  SparseSpec spec;

  const BucketLayout& layout() const { return *context.layout; }
  Agreement AgreementOf(uint64_t round) const {
    return {context.job, context.layout, round, spec.choice == Choice::kRandomK ? spec.density : 0};
  }

  bool adapts() const { return spec.choice == Choice::kAdaptive; }
  // What is not sent waits in the residual; zen and adaptive send all there is.
  bool keeps_rest() const { return spec.choice != Choice::kNonZero && !adapts(); }
  SentLimit sent_limit() const {
    switch (spec.values) {
      case ValueFormat::kFp32:
      case ValueFormat::k2Bit:  // means of magnitudes
        return SentLimitOf(context, kAllDigits);
      case ValueFormat::kFp16:
        return SentLimitOf(context, kFp16Digits);
      default:
        return SentLimitOf(context, kBf16Digits);  // integers times a scale, too, round
    }
  }
  // Whether `n` non-zeros of the bucket are sent with all the zeros between them: where that takes fewer bytes than
  // their values and a bitmap, which is the smallest index of so many.
  bool WritesAll(uint64_t n) const {
    const uint64_t elements = layout().elements;
    return adapts() && sizeof(float) * n + elements / 8 >= sizeof(float) * elements;
  }

  // Of a message with `n` pairs: frames must stay near the size of all elements, which coordinates of most of them do
  // not.
  IndexForm IndexOf(uint64_t n) const {
    const bool long_coordinates = spec.index == IndexForm::kCoordinates && 16 * n > 9 * layout().elements;
    return long_coordinates ? IndexForm::kBitmap : spec.index;
  }

  // Pairs of the whole bucket, in segments. `density`: about how many there are.
  void Write(const Pairs& pairs, std::span<float> values, ValueFormat format, uint64_t round, double density,
             FrameWriter* writer) const {
    uint32_t step = kLeastSegmentElements;
    while (step < kMaxSegmentElements && density * step < kPairsPerSegment) step *= 2;
    const uint64_t elements = layout().elements;
    const PairForm form = {format, IndexOf(pairs.positions.size())};
    size_t first = 0;
    for (uint64_t begin = 0; begin < elements; begin += step) {
      const uint32_t count = static_cast<uint32_t>(std::min<uint64_t>(step, elements - begin));
      const size_t last = static_cast<size_t>(std::lower_bound(pairs.positions.begin() + static_cast<ptrdiff_t>(first),
                                                               pairs.positions.end(), begin + count) -
                                              pairs.positions.begin());
      WritePairs(std::span(pairs.positions).subspan(first, last - first), values.subspan(first, last - first), begin,
                 count, form, AgreementOf(round), writer);
      first = last;
    }
  }
};

// All elements as blocks of float32; fill(begin, count, out) says which.
template <typename Fill>
void WriteBlocks(uint64_t elements, FrameWriter* writer, Fill fill) {
  std::vector<float> block(std::min<uint64_t>(elements, dense::kSegmentElements));
  for (uint64_t begin = 0; begin < elements; begin += dense::kSegmentElements) {
    const uint32_t count = static_cast<uint32_t>(std::min<uint64_t>(dense::kSegmentElements, elements - begin));
    fill(begin, count, block.data());
    const uint32_t bytes = count * static_cast<uint32_t>(sizeof(float));
    writer->Add({SegmentType::kDenseF32, 0, begin, count, bytes}, block.data());
  }
}

// Appends the pairs of a segment of a frame, whichever form it has. Its range must have been checked. Errors:
// InvalidArgument.
absl::Status ReadSegment(const Segment& s, const Agreement& agreement, Pairs* out, const LookAhead& ahead = {}) {
  if (s.type == SegmentType::kSparse) return ReadPairs(s, agreement, out, ahead);
  if (s.param != 0 || s.bytes != uint64_t{s.count} * sizeof(float)) {
    return absl::InvalidArgumentError(absl::StrFormat("%d float32 values in %d bytes", s.count, s.bytes));
  }
  for (uint32_t i = 0; i < s.count; ++i) {
    float value;
    std::memcpy(&value, s.data + sizeof(float) * i, sizeof(float));
    if (value == 0) continue;
    out->positions.push_back(static_cast<uint32_t>(s.begin + i));
    out->values.push_back(value);
  }
  return absl::OkStatus();
}

class SparseEncoder final : public Encoder {
 public:
  explicit SparseEncoder(const Shape& shape)
      : shape_(shape), marks_((std::min<uint64_t>(kStretch, shape.layout().elements) + kWordBits - 1) / kWordBits) {}

  absl::StatusOr<EncodedFrame> Encode(const FrameIdentity& id, const RoundPlan& plan,
                                      std::span<const RunInput> runs) override {
    wire::FrameWriter writer = BeginPush(id, shape_.layout(), plan);
    if (id.round == 0) return FinishEncoded(&writer, plan);
    if (shape_.adapts() && shape_.WritesAll(NonZerosOf(runs))) {
      WriteAll(runs, &writer);
      return FinishEncoded(&writer, plan, shape_.layout().elements);
    }
    Choose(id.round, runs);
    GW_RETURN_IF_ERROR(WriteChosen(id.round, &writer));
    TakeFrom(runs);
    return FinishEncoded(&writer, plan, pairs_.positions.size());
  }

  absl::StatusOr<EncodedFrame> EncodeElements(const FrameIdentity& id, const RoundPlan& plan,
                                              Elements elements) override {
    wire::FrameWriter writer = BeginPush(id, shape_.layout(), plan);
    if (id.round == 0) return FinishEncoded(&writer, plan);
    pairs_ = std::move(elements);
    if (shape_.WritesAll(pairs_.positions.size())) {
      WriteAll(&writer);
      return FinishEncoded(&writer, plan, shape_.layout().elements);
    }
    GW_RETURN_IF_ERROR(WriteChosen(id.round, &writer));
    return FinishEncoded(&writer, plan, pairs_.positions.size());
  }

 private:
  uint64_t NonZerosOf(std::span<const RunInput> runs) const {
    uint64_t n = 0;
    for (size_t r = 0; r < runs.size(); ++r) {
      const float* const x = runs[r].gradient;
      n += static_cast<uint64_t>(
          std::count_if(x, x + shape_.layout().runs[r].length, [](float value) { return value != 0; }));
    }
    return n;
  }

  // Those that were chosen.
  absl::Status WriteChosen(uint64_t round, FrameWriter* writer) {
    const BucketLayout& layout = shape_.layout();
    GW_RETURN_IF_ERROR(CheckHeld());
    if (shape_.keeps_rest()) {
      const SentLimit limit = shape_.sent_limit();
      for (float& value : pairs_.values) value = limit.Cut(value);
    }
    const double density =
        layout.elements == 0 ? 0 : static_cast<double>(pairs_.positions.size()) / static_cast<double>(layout.elements);
    shape_.Write(pairs_, pairs_.values, shape_.spec.values, round, density, writer);
    return absl::OkStatus();
  }

  // What is written no longer waits.
  void TakeFrom(std::span<const RunInput> runs) const {
    const BucketLayout& layout = shape_.layout();
    for (size_t k = 0, run = 0; shape_.keeps_rest() && k < pairs_.positions.size(); ++k) {
      while (pairs_.positions[k] >= layout.run_begin[run + 1]) ++run;
      const uint64_t at = pairs_.positions[k] - layout.run_begin[run];
      runs[run].pending[at] -= pairs_.values[k];
      // Momentum factor masking (Lin et al. 2017, section 3.3).
      if (runs[run].velocity != nullptr) runs[run].velocity[at] = 0;
    }
  }

  // What binary16 does not reach becomes its largest value, and without a residual nothing keeps the rest.
  absl::Status CheckHeld() const {
    if (shape_.keeps_rest() || shape_.spec.values != ValueFormat::kFp16) return absl::OkStatus();
    for (size_t k = 0; k < pairs_.values.size(); ++k) {
      if (std::fabs(pairs_.values[k]) < kHalfOverflow) continue;
      const BucketLayout& layout = shape_.layout();
      const size_t run = RunOf(layout, pairs_.positions[k]);
      return absl::InvalidArgumentError(
          absl::StrFormat("tensor '%s', element %d: value %g does not fit %s, whose values end at %.9g: scale what is "
                          "pushed, or let it "
                          "travel as values=fp32 or bf16",
                          shape_.context.job->tensors()[layout.runs[run].tensor].name,
                          layout.runs[run].offset + pairs_.positions[k] - layout.run_begin[run], pairs_.values[k],
                          ToString(shape_.spec), kernels::kLargestHalf));
    }
    return absl::OkStatus();
  }

  void WriteAll(std::span<const RunInput> runs, FrameWriter* writer) const {
    WriteBlocks(shape_.layout().elements, writer, [&](uint64_t begin, uint32_t count, float* out) {
      ForEachRunPiece(shape_.layout(), begin, count, [&](size_t run, uint64_t offset, uint64_t n, uint64_t position) {
        const float* const from = runs[run].gradient + offset;
        std::transform(from, from + n, out + (position - begin), [](float x) { return x + 0.0f; });  // -0 is 0
      });
    });
  }
  void WriteAll(FrameWriter* writer) const {
    size_t k = 0;
    WriteBlocks(shape_.layout().elements, writer, [&](uint64_t begin, uint32_t count, float* out) {
      std::fill_n(out, count, 0.0f);
      for (; k < pairs_.positions.size() && pairs_.positions[k] < begin + count; ++k)
        out[pairs_.positions[k] - begin] = pairs_.values[k];
    });
  }

  void Choose(uint64_t round, std::span<const RunInput> runs) {
    const BucketLayout& layout = shape_.layout();
    pairs_.positions.clear();
    pairs_.values.clear();
    if (shape_.spec.choice == Choice::kRandomK) {
      AgreedPositions(*shape_.context.job, layout, round, shape_.spec.density, 0, layout.elements, &pairs_.positions);
      for (size_t k = 0, run = 0; k < pairs_.positions.size(); ++k) {
        while (pairs_.positions[k] >= layout.run_begin[run + 1]) ++run;
        pairs_.values.push_back(runs[run].pending[pairs_.positions[k] - layout.run_begin[run]]);
      }
      return;
    }
    constexpr uint32_t kNotZero = 1;
    const float threshold = static_cast<float>(shape_.spec.threshold);
    for (size_t r = 0; r < runs.size(); ++r) {
      const Run& run = layout.runs[r];
      const float* const x = shape_.keeps_rest() ? runs[r].pending : runs[r].gradient;
      const uint32_t first = static_cast<uint32_t>(layout.run_begin[r]);
      switch (shape_.spec.choice) {
        case Choice::kNonZero:
        case Choice::kAdaptive:
          Take(x, run.length, first, {x, kNotZero}, [](float, uint32_t) { return true; });
          break;
        case Choice::kUnion:
          Take(x, run.length, first, {runs[r].gradient, kNotZero}, [](float, uint32_t) { return true; });
          break;
        case Choice::kThreshold:
          Take(x, run.length, first, {x, kernels::FloatBits(threshold)},
               [threshold](float value, uint32_t) { return std::fabs(value) >= threshold; });
          break;
        default: {
          const uint32_t phase = TiePhaseOf(*shape_.context.job, run, round);
          const Selection& selection = runs[r].selection;
          const Candidates least = {x, std::max(selection.key << kernels::kKeyShift, kNotZero)};
          Take(x, run.length, first, least, [&](float value, uint32_t i) {
            return kernels::IsSelected(value, selection.key, selection.keep_below, run.offset + i, phase);
          });
        }
      }
    }
  }

  // What may be chosen: where the magnitude of `of`, as bits of a float32, is at least `least`.
  struct Candidates {
    const float* of;
    uint32_t least;
  };
  // Those of the candidates among x[0 .. n), at the positions from `first` on, that `chosen(value, index)` says.
  template <typename Chosen>
  void Take(const float* x, uint32_t n, uint32_t first, const Candidates& candidates, Chosen chosen) {
    for (uint32_t begin = 0; begin < n; begin += kStretch) {
      const uint32_t length = std::min(kStretch, n - begin);
      shape_.context.backend->MarkAtLeast(candidates.of + begin, length, candidates.least, marks_.data());
      for (uint32_t at = 0; at < length; at += kWordBits) {
        for (uint64_t bits = marks_[at / kWordBits]; bits != 0; bits &= bits - 1) {
          const uint32_t i = begin + at + static_cast<uint32_t>(std::countr_zero(bits));
          if (!chosen(x[i], i)) continue;
          pairs_.positions.push_back(first + i);
          pairs_.values.push_back(x[i]);
        }
      }
    }
  }

  static constexpr uint32_t kWordBits = 64;
  static constexpr uint32_t kStretch = 1 << 17;  // elements; what is marked of them stays in the L1 cache

  const Shape shape_;
  Pairs pairs_;
  std::vector<uint64_t> marks_;  // of a stretch
};

// Sums: WholeSums or PagedSums (sums.h).
template <typename Sums>
class SparseAccumulator final : public Accumulator {
 public:
  explicit SparseAccumulator(const Shape& shape) : shape_(shape), sums_(shape.context) {}
  static size_t MostBytes(const Shape& shape) { return Sums::MostBytes(shape.context) + SegmentBytes(shape); }

  void Open(uint64_t round, const RoundPlan& plan) override {
    sums_.Clear();
    all_written_ = 0;
    round_ = round;
    plan_ = plan;
  }

  absl::Status Add(const Segment& s) override {
    GW_RETURN_IF_ERROR(CheckRange(s));
    GW_RETURN_IF_ERROR(Read(s));
    GW_RETURN_IF_ERROR(sums_.Add(pairs_));
    if (s.type == SegmentType::kDenseF32) all_written_ += s.count;
    return absl::OkStatus();
  }

  void Remove(const Segment& s) override {
    Read(s).IgnoreError();  // was added
    sums_.Remove(pairs_);
    if (s.type == SegmentType::kDenseF32) all_written_ -= s.count;
  }

  absl::StatusOr<UpdateFrame> Finish(const FrameIdentity& id, uint32_t contributors) override {
    wire::FrameWriter writer = BeginUpdateFrame(id, shape_.layout(), contributors);
    UpdateFrame update;
    if (contributors != 0 && round_ != 0) {
      Pairs pairs;
      pairs.positions = sums_.Union();
      update.stats.elements = pairs.positions.size();
      update.stats.traffic = TrafficOf(pairs.positions.size(), contributors);
      const double density = static_cast<double>(pairs.positions.size()) /
                             static_cast<double>(std::max<uint64_t>(1, shape_.layout().elements));
      if (update.stats.traffic.dense_update) {
        WriteBlocks(shape_.layout().elements, &writer,
                    [&](uint64_t begin, uint32_t count, float* out) { sums_.Means(begin, count, contributors, out); });
      } else {
        pairs.values.resize(pairs.positions.size());
        sums_.TakeMeans(pairs.positions, contributors, pairs.values.data());
        shape_.Write(pairs, pairs.values, ValueFormat::kFp32, round_, density, &writer);
      }
    }
    update.next = plan_;
    update.chunks = writer.Finish();
    return update;
  }

  size_t memory_bytes() const override { return sums_.memory_bytes() + SegmentBytes(shape_); }

 private:
  static size_t SegmentBytes(const Shape& shape) {
    return std::min<uint64_t>(kMaxSegmentElements, shape.layout().elements) * (sizeof(uint32_t) + sizeof(float));
  }

  absl::Status CheckRange(const Segment& s) const {
    const uint64_t elements = shape_.layout().elements;
    const bool pairs = s.type == SegmentType::kSparse && FormatOf(s.param) == shape_.spec.values;
    const bool all = s.type == SegmentType::kDenseF32 && shape_.adapts();
    if (round_ != 0 && (pairs || all) && s.begin <= elements && s.count <= elements - s.begin) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrFormat(
        "segment type %d (param %d) of elements [%d, %d + %d) does not belong in round %d of %s with %d "
        "elements",
        static_cast<int>(s.type), s.param, s.begin, s.begin, s.count, round_, ToString(shape_.spec), elements));
  }

  absl::Status Read(const Segment& s) {
    pairs_.positions.clear();
    pairs_.values.clear();
    return ReadSegment(s, shape_.AgreementOf(round_), &pairs_, sums_.ahead());
  }

  Traffic TrafficOf(uint64_t in_union, uint32_t contributors) const {
    const uint64_t elements = shape_.layout().elements;
    Traffic traffic;
    traffic.elements = elements;
    traffic.contributors = contributors;
    traffic.sent = sums_.Total();
    traffic.in_union = in_union;
    traffic.dense_pushes = elements == 0 ? 0 : static_cast<uint32_t>(all_written_ / elements);
    traffic.dense_update = shape_.WritesAll(in_union);
    return traffic;
  }

  const Shape shape_;
  Sums sums_;
  Pairs pairs_;               // of one segment
  uint64_t all_written_ = 0;  // elements in segments of the dense form
  uint64_t round_ = 0;
  RoundPlan plan_;
};

class SparseCodec final : public Codec {
 public:
  explicit SparseCodec(const Shape& shape) : shape_(shape) {}

  bool uses_residual() const override { return shape_.keeps_rest(); }
  bool sparse() const override { return true; }
  bool takes_elements() const override { return !shape_.keeps_rest(); }
  std::optional<kernels::Accuracy> selects() const override {
    if (shape_.spec.choice == Choice::kTopK) return kernels::Accuracy::kExact;
    // Lin et al. 2017, section 3.3 and appendix: thresholds come from a sample of the gradient.
    if (shape_.spec.choice == Choice::kDgc) return kernels::Accuracy::kEstimate;
    return std::nullopt;
  }
  std::optional<VelocityRule> velocity() const override {
    if (shape_.spec.choice != Choice::kDgc) return std::nullopt;
    // Section 3.2: each of N workers clips at N^-1/2 of what the sum is meant to have.
    const double workers = shape_.context.job->spec().max_workers();
    return VelocityRule{shape_.spec.momentum, shape_.spec.nesterov,
                        static_cast<float>(static_cast<double>(shape_.spec.clip) / std::sqrt(workers))};
  }
  bool chooses_by_mean() const override { return shape_.spec.choice == Choice::kUnion; }
  double Density(uint64_t round) const override { return shape_.spec.DensityAt(round); }
  uint32_t gradient_limit_bits() const override { return GridLimitBits(*shape_.context.job); }
  SentLimit sent_limit() const override {
    const SentLimit limit = shape_.sent_limit();
    if (shape_.spec.values != ValueFormat::kFp16 || limit.to <= kernels::kLargestHalf) return limit;
    return {.from = std::nextafter(kernels::kLargestHalf, limit.from), .to = kernels::kLargestHalf};
  }
  RoundPlan InitialPlan() const override { return {}; }
  std::unique_ptr<Encoder> NewEncoder() const override { return std::make_unique<SparseEncoder>(shape_); }
  std::unique_ptr<Accumulator> NewAccumulator() const override {
    if (pages()) return std::make_unique<SparseAccumulator<PagedSums>>(shape_);
    return std::make_unique<SparseAccumulator<WholeSums>>(shape_);
  }
  size_t accumulator_bytes() const override {
    return pages() ? SparseAccumulator<PagedSums>::MostBytes(shape_) : SparseAccumulator<WholeSums>::MostBytes(shape_);
  }

  absl::Status CheckComplete(uint64_t round, const RoundPlan&, std::span<const SegmentHeader> segments) const override {
    const bool all = shape_.adapts() && segments.size() > 1 && segments[1].type == SegmentType::kDenseF32;
    return CheckCoverage(shape_.layout(), round, all ? SegmentType::kDenseF32 : SegmentType::kSparse, segments);
  }

  absl::Status Return(const EncodedFrame& frame, const std::vector<uint32_t>* positions,
                      std::span<float* const> residual) const override {
    if (positions != nullptr) return absl::OkStatus();  // nothing is deferred
    GW_ASSIGN_OR_RETURN(const Pairs pairs, Carried(frame));
    const BucketLayout& layout = shape_.layout();
    for (size_t k = 0, run = 0; k < pairs.positions.size(); ++k) {
      while (pairs.positions[k] >= layout.run_begin[run + 1]) ++run;
      residual[run][pairs.positions[k] - layout.run_begin[run]] += pairs.values[k];
    }
    return absl::OkStatus();
  }

  absl::StatusOr<Elements> Carried(const EncodedFrame& frame) const override {
    GW_ASSIGN_OR_RETURN(const std::vector<wire::Chunk> chunks, wire::ParseFrame(frame.chunks));
    Pairs pairs;
    for (const wire::Chunk& chunk : chunks) {
      for (const Segment& s : chunk.segments) {
        if (s.type != SegmentType::kLearningRates)
          GW_RETURN_IF_ERROR(ReadSegment(s, shape_.AgreementOf(chunk.header.round), &pairs));
      }
    }
    return pairs;
  }

 private:
  // Gradients that are sparse by nature may be so in a bucket that is touched here and there.
  bool pages() const { return shape_.spec.choice == Choice::kNonZero; }

  const Shape shape_;
};

}  // namespace

std::unique_ptr<Codec> MakeSparseCodec(const CodecContext& context, const SparseSpec& spec) {
  return std::make_unique<SparseCodec>(Shape{context, spec});
}

}  // namespace gradwire::sparse

// The TAGC codec of one bucket: makes encoders and accumulators, checks whole frames, returns what was not applied.
#include "common/codec/tagc/tagc_codec.h"

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/frame/run_pieces.h"
#include "common/codec/tagc/device_encoder.h"
#include "common/codec/tagc/list_sums.h"
#include "common/codec/tagc/tagc_accumulator.h"
#include "common/codec/tagc/tagc_encoder.h"
#include "common/codec/tagc/tagc_shape.h"
#include "kernels/math/math.h"

namespace gradwire {
namespace {

using tagc::TagcShape;
using wire::SegmentHeader;
using wire::SegmentType;

class TagcCodec final : public Codec {
 public:
  explicit TagcCodec(const TagcShape& shape) : shape_(shape) {}

  bool uses_residual() const override { return true; }
  bool sparse() const override { return true; }
  // The paper's threshold is one that follows the gradients, not the k-th largest magnitude.
  std::optional<kernels::Accuracy> selects() const override { return kernels::Accuracy::kEstimate; }
  bool defers() const override { return shape_.sketches(); }
  double Density(uint64_t round) const override { return shape_.spec.DensityAt(round); }

  RoundPlan InitialPlan() const override {
    RoundPlan plan;
    plan.exponents.assign(shape_.layout().runs.size(), kUncalibrated);
    return plan;
  }

  std::unique_ptr<Encoder> NewEncoder() const override { return std::make_unique<tagc::TagcEncoder>(shape_); }
  std::unique_ptr<Accumulator> NewAccumulator() const override {
    return std::make_unique<tagc::TagcAccumulator>(shape_, tagc::MakeHostSums(shape_));
  }
  absl::StatusOr<std::unique_ptr<Accumulator>> NewDeviceAccumulator(
      kernels::cuda::DeviceBucket* bucket) const override {
    GW_ASSIGN_OR_RETURN(std::unique_ptr<tagc::SketchSums> cells, tagc::MakeDeviceSums(shape_, bucket));
    return std::make_unique<tagc::TagcAccumulator>(shape_, std::move(cells));
  }
  absl::StatusOr<std::unique_ptr<Encoder>> NewDeviceEncoder(kernels::cuda::DeviceBucket* bucket) const override {
    return tagc::MakeDeviceEncoder(shape_, bucket);
  }

  size_t accumulator_bytes() const override {
    return HostBytes() + (shape_.sketches() ? shape_.limits.max_cells * static_cast<size_t>(shape_.cell_bytes) : 0);
  }
  DeviceNeeds device_needs() const override {
    DeviceNeeds needs = tagc::NeedsOnDevice(shape_);
    needs.host_bytes = HostBytes();
    return needs;
  }

  absl::Status CheckComplete(uint64_t round, const RoundPlan& plan,
                             std::span<const SegmentHeader> segments) const override {
    size_t next = 0;
    if (segments.empty() || segments[0].type != SegmentType::kLearningRates) {
      return Incomplete(round, "does not begin with learning rates");
    }
    if (segments[0].begin != 0 || segments[0].count != shape_.learning_rates()) {
      return Incomplete(round, absl::StrFormat("has %d learning rates, the job has %d parameter groups",
                                               segments[0].count, shape_.learning_rates()));
    }
    ++next;
    GW_RETURN_IF_ERROR(Covers(round, "runs", SegmentType::kRanges, 0, shape_.layout().runs.size(), segments, &next));
    if (!TagcShape::Calibrating(round, plan)) {
      const uint64_t cells = uint64_t{plan.sketch_groups} * plan.cells_per_group;
      const uint64_t sketched = CoveredBy(SegmentType::kIndex, segments.subspan(next));
      GW_RETURN_IF_ERROR(Covers(round, "sketched elements", SegmentType::kIndex, 0, sketched, segments, &next));
      if (sketched != 0) {
        GW_RETURN_IF_ERROR(Covers(round, "cells", SegmentType::kCells, 0, cells, segments, &next));
      }
      GW_RETURN_IF_ERROR(Covers(round, "elements", SegmentType::kList, sketched, shape_.elements(), segments, &next));
    }
    if (next == segments.size()) return absl::OkStatus();
    return Incomplete(round, absl::StrFormat("has %d segments too many", segments.size() - next));
  }

  absl::Status Return(const EncodedFrame& frame, const std::vector<uint32_t>* positions,
                      std::span<float* const> residual) const override {
    const BucketLayout& layout = shape_.layout();
    if (residual.size() != layout.runs.size() || frame.positions.size() != frame.integers.size()) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "bucket %d: %d residual runs, %d positions, %d integers; the layout has %d runs", layout.bucket,
          residual.size(), frame.positions.size(), frame.integers.size(), layout.runs.size()));
    }
    size_t run = 0;
    size_t wanted = 0;
    for (size_t i = 0; i < frame.positions.size(); ++i) {
      const uint32_t p = frame.positions[i];
      if (positions != nullptr) {
        while (wanted < positions->size() && (*positions)[wanted] < p) ++wanted;
        if (wanted == positions->size()) break;
        if ((*positions)[wanted] != p) continue;
      }
      if (p >= layout.run_begin[run + 1]) run = RunOf(layout, p);
      residual[run][p - layout.run_begin[run]] +=
          static_cast<float>(frame.integers[i]) * kernels::PowerOfTwo(frame.plan.exponents[run]);
    }
    return absl::OkStatus();
  }

 private:
  // Of an accumulator, beside its cells.
  size_t HostBytes() const {
    const size_t planes = shape_.sketches() ? static_cast<size_t>(std::bit_width(shape_.max_workers())) : 0;
    return planes * ((shape_.elements() + 63) / 64) * 8 +
           RangeHistogram(1).memory_bytes() * shape_.layout().runs.size() + tagc::ListSums::Bytes(shape_);
  }

  // How many elements the first segments, of one type, cover; no more than there are.
  uint64_t CoveredBy(SegmentType type, std::span<const SegmentHeader> segments) const {
    uint64_t covered = 0;
    for (size_t i = 0; i < segments.size() && segments[i].type == type; ++i) covered += segments[i].count;
    return std::min(covered, shape_.elements());
  }

  // Takes the segments of one type, which must cover [covered, total) once and in order.
  absl::Status Covers(uint64_t round, std::string_view what, SegmentType type, uint64_t covered, uint64_t total,
                      std::span<const SegmentHeader> segments, size_t* next) const {
    while (*next < segments.size() && segments[*next].type == type) {
      const SegmentHeader& s = segments[*next];
      if (s.begin != covered || s.count == 0 || s.count > total - covered) {
        return Incomplete(round, absl::StrFormat("covers [%d, %d + %d) where %s from %d were expected", s.begin,
                                                 s.begin, s.count, std::string(what), covered));
      }
      covered += s.count;
      ++*next;
    }
    if (covered == total) return absl::OkStatus();
    return Incomplete(round, absl::StrFormat("covers %d of %d %s", covered, total, std::string(what)));
  }

  absl::Status Incomplete(uint64_t round, std::string_view what) const {
    return absl::InvalidArgumentError(absl::StrFormat("frame of bucket %d on shard %d, round %d, %s",
                                                      shape_.layout().bucket, shape_.layout().shard, round,
                                                      std::string(what)));
  }

  const TagcShape shape_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Codec>> MakeTagcCodec(const CodecContext& context, const TagcSpec& spec) {
  GW_ASSIGN_OR_RETURN(const TagcShape shape, TagcShape::Make(context, spec));
  return std::make_unique<TagcCodec>(shape);
}

}  // namespace gradwire

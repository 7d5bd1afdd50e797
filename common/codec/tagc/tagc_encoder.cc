// TAGC encoding: ranges, then what the selection takes out of the residual as an index and a sketch.
#include "common/codec/tagc/tagc_encoder.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "kernels/math/select.h"

namespace gradwire::tagc {

using wire::FrameWriter;
using wire::SegmentType;

absl::Status TagcEncoder::CheckInput(const FrameIdentity& id, const RoundPlan& plan,
                                     std::span<const RunInput> runs) const {
  if (runs.size() != shape_.layout().runs.size()) {
    return absl::InvalidArgumentError(absl::StrFormat("bucket %d: %d runs given, the layout has %d", id.bucket,
                                                      runs.size(), shape_.layout().runs.size()));
  }
  return shape_.CheckPlan(id.round, plan);
}

absl::StatusOr<EncodedFrame> TagcEncoder::Encode(const FrameIdentity& id, const RoundPlan& plan,
                                                 std::span<const RunInput> runs) {
  GW_RETURN_IF_ERROR(CheckInput(id, plan, runs));
  wire::FrameHeader header = HeaderFor(id, wire::FrameKind::kPush, shape_.layout().shape_digest);
  header.plan_digest = plan.Digest();
  FrameWriter writer(header);
  const uint32_t groups = static_cast<uint32_t>(id.learning_rates.size());
  writer.Add({SegmentType::kLearningRates, 0, 0, groups, groups * 4}, id.learning_rates.data());
  WriteRanges(runs, &writer);
  EncodedFrame frame;
  frame.plan = plan;
  if (!TagcShape::Calibrating(id.round, plan)) {
    TakeSelected(id.round, plan, runs, &frame);
    WriteIndex(frame, &writer);
    WriteCells(shape_.SketchOf(id.round, plan), frame, &writer);
  }
  frame.chunks = writer.Finish();
  frame.bytes = TotalSize(frame.chunks);
  return frame;
}

void TagcEncoder::WriteRanges(std::span<const RunInput> runs, FrameWriter* writer) {
  ranges_.resize(runs.size());
  for (size_t i = 0; i < runs.size(); ++i) {
    ranges_[i] =
        static_cast<int8_t>(shape_.backend().RangeOf(runs[i].pending, shape_.layout().runs[i].length, nullptr));
  }
  AddSplit(SegmentType::kRanges, 0, ranges_.data(), ranges_.size(), 1, writer);
}

void TagcEncoder::TakeSelected(uint64_t round, const RoundPlan& plan, std::span<const RunInput> runs,
                               EncodedFrame* frame) {
  const BucketLayout& layout = shape_.layout();
  for (size_t i = 0; i < runs.size(); ++i) {
    const Run& run = layout.runs[i];
    if (run_positions_.size() < run.length) {
      run_positions_.resize(run.length);
      run_integers_.resize(run.length);
    }
    const kernels::SelectArgs args = {
        .key = runs[i].selection.key,
        .keep_below = runs[i].selection.keep_below,
        .phase = kernels::TiePhase(shape_.context.job->spec().seed(), run.tensor, round),
        .first_element = run.offset,
        .exponent = plan.exponents[i],
        .limit = shape_.limit,
    };
    const size_t n =
        shape_.backend().TakeSelected(runs[i].pending, run.length, args, static_cast<uint32_t>(layout.run_begin[i]),
                                      run_positions_.data(), run_integers_.data(), nullptr);
    frame->positions.insert(frame->positions.end(), run_positions_.begin(),
                            run_positions_.begin() + static_cast<ptrdiff_t>(n));
    frame->integers.insert(frame->integers.end(), run_integers_.begin(),
                           run_integers_.begin() + static_cast<ptrdiff_t>(n));
  }
}

void TagcEncoder::WriteIndex(const EncodedFrame& frame, FrameWriter* writer) const {
  const std::span<const uint32_t> all(frame.positions);
  size_t first = 0;
  for (uint64_t begin = 0; begin < shape_.elements(); begin += shape_.index_block) {
    const uint32_t count = static_cast<uint32_t>(std::min<uint64_t>(shape_.index_block, shape_.elements() - begin));
    size_t last = first;
    while (last < all.size() && all[last] < begin + count) ++last;
    AddIndex(SegmentType::kIndex, all.subspan(first, last - first), begin, count, writer);
    first = last;
  }
}

void TagcEncoder::WriteCells(const kernels::SketchArgs& sketch, const EncodedFrame& frame, FrameWriter* writer) {
  const uint64_t cells = uint64_t{sketch.groups} * sketch.cells_per_group;
  const size_t width = static_cast<size_t>(shape_.cell_bytes);
  cells_.assign(cells * width, 0);
  shape_.backend().SketchAdd(frame.positions.data(), frame.integers.data(), frame.positions.size(), sketch,
                             cells_.data(), nullptr);
  AddSplit(SegmentType::kCells, static_cast<uint8_t>(shape_.cell_bytes), cells_.data(), cells, width, writer);
}

}  // namespace gradwire::tagc

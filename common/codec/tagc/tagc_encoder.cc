// TAGC encoding: ranges, then what the selection takes out of the residual, as lists, or as an index and a sketch with
// lists of what that has no room for.
#include "common/codec/tagc/tagc_encoder.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/bits/salts.h"
#include "kernels/math/select.h"

namespace gradwire::tagc {

absl::StatusOr<EncodedFrame> TagcEncoder::Encode(const FrameIdentity& id, const RoundPlan& plan,
                                                 std::span<const RunInput> runs) {
  GW_RETURN_IF_ERROR(shape_.CheckInput(id, plan, runs.size()));
  EncodedFrame frame;
  frame.plan = plan;
  const bool calibrating = TagcShape::Calibrating(id.round, plan);
  ranges_.resize(runs.size());
  // One after the other, so that a run is still in the cache when it is read again.
  for (size_t i = 0; i < runs.size(); ++i) {
    ranges_[i] =
        static_cast<int8_t>(shape_.backend().RangeOf(runs[i].pending, shape_.layout().runs[i].length, nullptr));
    if (!calibrating) TakeSelected(id.round, i, runs[i], &frame);
  }
  if (!calibrating) FillCells(shape_.SketchOf(id.round, plan), frame);
  frame.chunks = WriteFrame(shape_, id, frame, ranges_, cells_);
  frame.bytes = TotalSize(frame.chunks);
  return frame;
}

void TagcEncoder::TakeSelected(uint64_t round, size_t i, const RunInput& input, EncodedFrame* frame) {
  const BucketLayout& layout = shape_.layout();
  const Run& run = layout.runs[i];
  if (run_positions_.size() < run.length) {
    run_positions_.resize(run.length);
    run_integers_.resize(run.length);
  }
  const kernels::SelectArgs args = {
      .key = input.selection.key,
      .keep_below = input.selection.keep_below,
      .phase = TiePhaseOf(*shape_.context.job, run, round),
      .first_element = run.offset,
      .exponent = frame->plan.exponents[i],
      .limit = shape_.limit,
  };
  const size_t n =
      shape_.backend().TakeSelected(input.pending, run.length, args, static_cast<uint32_t>(layout.run_begin[i]),
                                    run_positions_.data(), run_integers_.data(), nullptr);
  frame->positions.insert(frame->positions.end(), run_positions_.begin(),
                          run_positions_.begin() + static_cast<ptrdiff_t>(n));
  frame->integers.insert(frame->integers.end(), run_integers_.begin(),
                         run_integers_.begin() + static_cast<ptrdiff_t>(n));
}

void TagcEncoder::FillCells(const kernels::SketchArgs& sketch, const EncodedFrame& frame) {
  const size_t sketched = shape_.SketchedOf(frame.plan, frame.positions.size());
  if (sketched == 0) return;
  const uint64_t cells = uint64_t{sketch.groups} * sketch.cells_per_group;
  cells_.assign(cells * static_cast<size_t>(shape_.cell_bytes), 0);
  shape_.backend().SketchAdd(frame.positions.data(), frame.integers.data(), sketched, sketch, cells_.data(), nullptr);
}

}  // namespace gradwire::tagc

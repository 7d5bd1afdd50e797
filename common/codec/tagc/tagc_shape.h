// What encoder and accumulator of the TAGC codec share: sizes of one bucket, derived and validated once.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/codec/codec.h"
#include "common/codec/frame/frame_header.h"
#include "common/codec/tagc/geometry.h"
#include "kernels/backend.h"

namespace gradwire::tagc {

// Immutable after Make.
struct TagcShape {
  CodecContext context;
  TagcSpec spec;
  int cell_bytes = 1;
  int32_t limit = 0;         // largest integer of one worker
  int headroom = 0;          // NextExponent's
  uint32_t index_block = 0;  // elements covered by one index segment of a frame
  GeometryLimits limits;

  static absl::StatusOr<TagcShape> Make(const CodecContext& context, const TagcSpec& spec);

  const BucketLayout& layout() const { return *context.layout; }
  uint64_t elements() const { return context.layout->elements; }
  kernels::Backend& backend() const { return *context.backend; }
  uint32_t max_workers() const { return context.job->spec().max_workers(); }
  // Whether frames may have sketches.
  bool sketches() const { return spec.form == TagcSpec::Form::kSketch; }
  size_t learning_rates() const { return static_cast<size_t>(context.job->spec().optimizer().groups_size()); }

  // True while there is no plan by which values could be encoded: frames then carry ranges alone.
  static bool Calibrating(uint64_t round, const RoundPlan& plan) { return round == 0 || plan.sketch_groups == 0; }
  // Errors: InvalidArgument for a plan that does not fit this bucket. Plans arrive in update frames.
  absl::Status CheckPlan(uint64_t round, const RoundPlan& plan) const;
  // The same for what is given to an encoder: memory of so many runs.
  absl::Status CheckInput(const FrameIdentity& id, const RoundPlan& plan, size_t runs) const;
  kernels::SketchArgs SketchOf(uint64_t round, const RoundPlan& plan) const;
  // How many of the `n` elements of a frame go into its sketch; the others are listed. None where frames are lists;
  // else the first ones, and no more than a worker's share of what the sketch holds, so that no round overloads it,
  // whatever the round before was like.
  size_t SketchedOf(const RoundPlan& plan, size_t n) const;
  // The exponent of a run in the next round. `range`: the largest that any worker sent.
  int8_t NextRunExponent(int8_t current, int range) const;
};

// A worker's frame from its parts: the range of each run and, where values can be encoded, what `frame` says is sent
// and the cells that hold the first of its integers (SketchedOf).
std::vector<Bytes> WriteFrame(const TagcShape& shape, const FrameIdentity& id, const EncodedFrame& frame,
                              std::span<const int8_t> ranges, std::span<const uint8_t> cells);

// Writes `count` items of `item_bytes` as segments that fit a chunk each.
void AddSplit(wire::SegmentType type, uint8_t param, const void* data, uint64_t count, size_t item_bytes,
              wire::FrameWriter* writer);

// Writes the values of the runs from `begin` on as one segment.
void AddRuns(wire::SegmentType type, uint64_t begin, std::span<const int8_t> values, wire::FrameWriter* writer);

// Writes the positions that lie in [begin, begin + count) as one segment.
void AddIndex(wire::SegmentType type, std::span<const uint32_t> positions, uint64_t begin, uint32_t count,
              wire::FrameWriter* writer);

}  // namespace gradwire::tagc

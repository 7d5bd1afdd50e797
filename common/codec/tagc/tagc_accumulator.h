// The shard's side of the TAGC codec: adds lists, merges sketches without decoding them and peels those once per round.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "common/codec/codec.h"
#include "common/codec/plan/ranges.h"
#include "common/codec/tagc/list_sums.h"
#include "common/codec/tagc/position_counters.h"
#include "common/codec/tagc/sketch_sums.h"
#include "common/codec/tagc/tagc_shape.h"

namespace gradwire::tagc {

class TagcAccumulator final : public Accumulator {
 public:
  TagcAccumulator(const TagcShape& shape, std::unique_ptr<SketchSums> cells);

  void Open(uint64_t round, const RoundPlan& plan) override;
  absl::Status Add(const wire::Segment& segment) override;
  void Remove(const wire::Segment& segment) override;
  absl::StatusOr<UpdateFrame> Finish(const FrameIdentity& id, uint32_t contributors) override;
  size_t memory_bytes() const override;

 private:
  // The round's sums: what peeling resolved and what was listed, without sums of 0, and what it could not.
  struct Sums {
    std::vector<uint32_t> positions;
    std::vector<int32_t> integers;
    std::vector<uint32_t> deferred;
    uint64_t sent = 0;  // elements in all frames together
  };

  absl::Status AddRanges(const wire::Segment& segment);
  absl::Status AddPositions(const wire::Segment& segment);
  absl::Status AddCells(const wire::Segment& segment);
  absl::Status AddList(const wire::Segment& segment);
  absl::Status CheckRange(const wire::Segment& segment, uint64_t limit) const;
  // Errors: InvalidArgument when more has been merged than max_workers frames hold. Sums could wrap otherwise.
  absl::Status CheckShare(const wire::Segment& segment, uint64_t merged, uint64_t per_worker) const;
  absl::Status CheckElements(const wire::Segment& segment) const;
  uint64_t cells() const { return uint64_t{sketch_.groups} * sketch_.cells_per_group; }
  // Makes room for sketches, in a round that has some. Errors: InvalidArgument where the job has none.
  absl::Status OpenSketch(const wire::Segment& segment);
  absl::StatusOr<Sums> Decode();
  absl::Status DecodeSketch(Sums* sums);
  void WriteDeferred(const Sums& sums, wire::FrameWriter* writer) const;
  RoundPlan NextPlan(const Sums& sums) const;

  const TagcShape shape_;
  uint64_t round_ = 0;
  RoundPlan plan_;
  absl::Status plan_status_;
  kernels::SketchArgs sketch_;
  RangeHistogram ranges_;
  bool sketched_ = false;                     // in this round
  std::optional<PositionCounters> counters_;  // of sketched elements; made for the first sketch
  const std::unique_ptr<SketchSums> cells_;
  ListSums lists_;
  uint64_t merged_runs_ = 0;  // over all workers
  uint64_t merged_elements_ = 0;
  uint64_t merged_cells_ = 0;
  std::vector<uint32_t> scratch_;
  std::vector<int8_t> frame_ranges_;
};

}  // namespace gradwire::tagc

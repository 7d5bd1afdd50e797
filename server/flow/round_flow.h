// The flow of rounds that all workers make together, with or without a quorum or bounded staleness: a bucket's frames
// are merged into the accumulator of their round chunk by chunk, as they come.
#pragma once

#include <map>
#include <span>

#include "server/flow/flow.h"

namespace gradwire {

class RoundFlow final : public Flow {
 public:
  using Flow::Flow;
  OpenRound* PlaceOf(BucketState& bucket, uint64_t round) const override ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) {
    return bucket.Find(round);
  }
  absl::StatusOr<PushVerdict> Take(BucketState& bucket, OpenRound& open, PushStream& stream, const wire::Chunk& chunk,
                                   std::span<const Bytes> received, RoundActions* actions, bool* complete) override
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  uint64_t MadeBy(const wire::FrameHeader&, PushVerdict, std::optional<uint64_t>) const override { return 0; }
  // Opens the rounds whose plan came with the version.
  void OpenNext(BucketState& bucket) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);

 private:
  absl::Status BeginPartial(BucketState& bucket, OpenRound* open, PushStream& stream,
                            const wire::FrameHeader& header) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  void DropUnfinished(BucketState& bucket, OpenRound& open) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  uint64_t PlanVersionOf(const RoundActions::Close& close) const override {
    return PlanVersion(parts_.job, close.round);
  }
  // Whether the round has frames, or beginnings of them, of as many others as sums are dimensioned for: workers that
  // left may have filled it. One more waits in its worker's residual; an accumulator need not have room for its chunks.
  bool IsFull(const OpenRound& open, MemberId member) const;
  // Whether the round takes these learning rates in the place of those that it has. InvalidArgument: they differ from
  // the rates of an older member.
  absl::StatusOr<bool> TakesRates(const OpenRound& open, MemberId member, std::span<const float> rates);

  // Members whose frame was merged before an older member's showed that their schedule is another: they are told
  // with their next frame. Holds present members only.
  std::map<MemberId, absl::Status> other_rates_ ABSL_GUARDED_BY(parts_.mu);
};

}  // namespace gradwire

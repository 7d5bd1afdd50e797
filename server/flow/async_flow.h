// The flow of asynchronous rounds: a frame is kept until it is whole, then merged alone, and makes a version. Frames
// that were computed on different versions are encoded by different plans and cannot share an accumulator, and a frame
// that waits for its last chunk would hold up the others.
#pragma once

#include "server/flow/flow.h"

namespace gradwire {

class AsyncFlow final : public Flow {
 public:
  using Flow::Flow;
  OpenRound* PlaceOf(BucketState& bucket, uint64_t) const override ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) {
    return bucket.open.data();
  }
  // With the last chunk the frame is merged, once the frame before it has made its version.
  absl::StatusOr<PushVerdict> Take(BucketState& bucket, OpenRound& open, PushStream& stream, const wire::Chunk& chunk,
                                   std::span<const Bytes> received, RoundActions* actions, bool* complete) override
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  uint64_t MadeBy(const wire::FrameHeader& header, PushVerdict verdict, std::optional<uint64_t> closed) const override;
  // Opens nothing: the next frame opens the place for itself.
  void OpenNext(BucketState& bucket) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) {
    bucket.open[0].round = OpenRound::kNone;
  }

 private:
  absl::Status BeginPartial(BucketState& bucket, OpenRound* open, PushStream& stream,
                            const wire::FrameHeader& header) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  // Drops nothing: unfinished frames hold nothing of the accumulator.
  void DropUnfinished(BucketState&, OpenRound&) override {}
  uint64_t PlanVersionOf(const RoundActions::Close& close) const override {
    return close.contributions.begin()->second.round;
  }
  // `chunks`: all of the frame, as they were received; `last`: the last one, parsed.
  absl::StatusOr<PushVerdict> MergeWhole(BucketState& bucket, OpenRound& open, const PushStream& stream,
                                         const std::vector<std::vector<Bytes>>& chunks, const wire::Chunk& last,
                                         RoundActions* actions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  // The verdict on a frame that another stream of the worker has brought meanwhile.
  absl::StatusOr<PushVerdict> Repeat(const PushStream& stream, const std::vector<std::vector<Bytes>>& chunks,
                                     const wire::Chunk& last) const;
};

}  // namespace gradwire

// How frames of gradients become closed buckets: chosen when the job is made, by the kind of its rounds.
//
//   Begin, Take: chunk by chunk, under the bucket's mutex ... the last frame of a bucket -> Rounds says "close"
//     -> Finish: the update frame, the first of the job's stages
#pragma once

#include <cstdint>
#include <span>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/bytes.h"
#include "common/wire/frame.h"
#include "server/flow/push_stream.h"
#include "server/job/job_parts.h"
#include "server/rounds/rounds.h"
#include "server/stages/stage.h"

namespace gradwire {

inline bool IsLast(const wire::FrameHeader& header) { return (header.flags & wire::kLastChunk) != 0; }

// Thread-safe: its data are guarded by the bucket's mutex and the job's.
class Flow {
 public:
  explicit Flow(JobParts* parts) : parts_(*parts) {}
  virtual ~Flow() = default;

  // Where unfinished frames of `round` are kept; null where the round is not open here.
  virtual OpenRound* PlaceOf(BucketState& bucket, uint64_t round) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) = 0;
  // The first chunk of a frame. kAccept: the frame has a place among the unfinished ones. Errors: those of
  // Rounds::Classify; the frame's beginning is missing, the bucket stopped, or the round cannot take such a frame.
  absl::StatusOr<PushVerdict> Begin(BucketState& bucket, OpenRound* open, PushStream& stream,
                                    const wire::FrameHeader& header) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  // A chunk of a frame that has begun. *complete: whether this chunk decided on the frame. After an error the caller
  // abandons what is left of the frame.
  virtual absl::StatusOr<PushVerdict> Take(BucketState& bucket, OpenRound& open, PushStream& stream,
                                           const wire::Chunk& chunk, std::span<const Bytes> received,
                                           RoundActions* actions, bool* complete)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) = 0;
  // PushAck::made of a frame with this verdict; `closed`: the round that it closed, if it closed one.
  virtual uint64_t MadeBy(const wire::FrameHeader& header, PushVerdict verdict,
                          std::optional<uint64_t> closed) const = 0;

  // Makes the update of a bucket that has closed, once the bucket is at that round. Errors: those of
  // Accumulator::Finish; the bucket stopped; our own bugs.
  absl::Status Finish(ClosedBucket* closed);
  // The bucket has come to its version: opens the rounds that frames may be merged into from now on.
  virtual void OpenNext(BucketState& bucket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) = 0;

 protected:
  virtual absl::Status BeginPartial(BucketState& bucket, OpenRound* open, PushStream& stream,
                                    const wire::FrameHeader& header) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) = 0;
  // Takes frames that are not whole when their round closes out of its accumulator.
  virtual void DropUnfinished(BucketState& bucket, OpenRound& open) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) = 0;
  // The version whose plan the frames of the round, and its update, are encoded by.
  virtual uint64_t PlanVersionOf(const RoundActions::Close& close) const = 0;
  // Whether a frame that is in the accumulator counts. Renews the worker's lease.
  absl::StatusOr<PushVerdict> Complete(const PushStream& stream, const wire::FrameHeader& header, uint32_t digest,
                                       RoundActions* actions);

  JobParts& parts_;
};

}  // namespace gradwire

// Rounds in which workers replace the parameters: proto/ROUNDS.md, "Replaced parameters". Every worker of the round
// abstains with the same values: the first whole frame of a bucket brings them, the others are compared with it. The
// round's update frame then carries parameters.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/bytes.h"
#include "common/wire/frame.h"
#include "server/flow/flow.h"
#include "server/flow/push_stream.h"
#include "server/job/job_parts.h"

namespace gradwire {

// Thread-safe.
class ReplacementIntake {
 public:
  ReplacementIntake(JobParts* parts, Flow* flow) : parts_(*parts), flow_(*flow) {}

  // A chunk. With the last one the worker has abstained, and the round replaces parameters. kNotIncluded, kDuplicate:
  // as Rounds::Abstain.
  absl::StatusOr<PushVerdict> Take(PushStream& stream, const wire::Chunk& chunk, std::span<const Bytes> received,
                                   RoundActions* actions);

 private:
  absl::Status CheckAllowed(const wire::FrameHeader& header) const;
  // Keeps a chunk, within what the parameters of the bucket may take.
  absl::Status Keep(const BucketState& bucket, PartialFrame* partial, std::span<const Bytes> received);
  // The frame is whole.
  absl::StatusOr<PushVerdict> Complete(BucketState& bucket, OpenRound& open, const PushStream& stream,
                                       const wire::FrameHeader& header, RoundActions* actions)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  // Decodes the frame. *first: its values, where it is the round's first; else they must equal the first frame's.
  absl::Status Decode(const BucketState& bucket, const OpenRound& open, const PushStream& stream, uint64_t round,
                      std::span<const Bytes> chunks, std::optional<Replacement>* first) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);

  JobParts& parts_;
  Flow& flow_;
};

// The update of a round that replaces parameters.
UpdateFrame ReplacingUpdateOf(BucketState& bucket, const RoundPlan& plan, const OpenRound& open)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);

}  // namespace gradwire

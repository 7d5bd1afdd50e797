// What the ways of a chunk (Intake) share: the unfinished frames of a bucket's open rounds, and what a round may hold.
#pragma once

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "common/codec/frame/frame_assembler.h"
#include "common/job/job.h"
#include "server/flow/push_stream.h"
#include "server/job/bucket_state.h"
#include "server/job/in_flight.h"

namespace gradwire {

// The identity of the update that the bucket's next version is made by.
FrameIdentity IdentityOf(const BucketState& bucket, const OpenRound& open) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);

// Takes the merged part of the member's unfinished frame, if it has one, out again. Where that fails the bucket stops.
void AbandonPartial(BucketState& bucket, OpenRound& open, MemberId member, InFlight* in_flight)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);

// The beginning of the frame that a chunk from this stream goes on with is here. `replaces`: the frame's kind.
bool HasBegun(const PushStream& stream, bool replaces, const OpenRound* open);

// The member has sent the frame anew on a later stream, while this one has yet to end.
bool IsSuperseded(const PushStream& stream, const OpenRound* open);

// A round has either gradients or parameters that replace the job's; `replaces`: parameters come.
absl::Status CheckUnmixed(const OpenRound& open, bool replaces);

// The error for a frame of a round that the bucket has not opened.
absl::Status StillFinishing(const Job& job, const BucketState& bucket, uint64_t round)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);

// Not ok unless the frame has a learning rate for each of the job's parameter groups.
absl::Status CheckLearningRates(const Job& job, const FrameAssembler& frame);

}  // namespace gradwire

// See flow.h.
#include "server/flow/flow.h"

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "server/flow/open_rounds.h"
#include "server/flow/replacement.h"

namespace gradwire {

absl::StatusOr<PushVerdict> Flow::Begin(BucketState& bucket, OpenRound* open, PushStream& stream,
                                        const wire::FrameHeader& header) {
  // A frame that starts anew replaces its unfinished beginning.
  if (open != nullptr) AbandonPartial(bucket, *open, stream.member, &parts_.in_flight);
  PushVerdict verdict;
  {
    absl::MutexLock lock(&parts_.mu);
    GW_ASSIGN_OR_RETURN(verdict, parts_.rounds->Classify(stream.member, header.bucket, header.round));
    parts_.rounds->Renew(stream.member, parts_.environment.clock->Now());
  }
  if (verdict != PushVerdict::kAccept) return verdict;
  if (header.chunk != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("chunk %d of a frame whose beginning is not here: send the frame from chunk 0", header.chunk));
  }
  GW_RETURN_IF_ERROR(bucket.failure);
  GW_RETURN_IF_ERROR(BeginPartial(bucket, open, stream, header));
  return verdict;
}

absl::StatusOr<PushVerdict> Flow::Complete(const PushStream& stream, const wire::FrameHeader& header, uint32_t digest,
                                           RoundActions* actions) {
  absl::MutexLock lock(&parts_.mu);
  const TimeNs now = parts_.NowOfRounds();
  GW_ASSIGN_OR_RETURN(const PushVerdict verdict,
                      parts_.rounds->Complete(stream.member, header.bucket, header.round, digest, now, actions));
  parts_.rounds->Renew(stream.member, now);
  if (verdict == PushVerdict::kAccept) parts_.traffic.NoteFrame(stream.member);
  return verdict;
}

absl::Status Flow::Finish(ClosedBucket* closed) {
  BucketState& bucket = *closed->bucket;
  const RoundActions::Close& close = closed->close;
  absl::MutexLock lock(&bucket.mu);
  // Another thread may still be finishing the round before: where several are open, or one closed without frames.
  const auto reached = [&bucket, &close]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) {
    return bucket.version >= close.round || !bucket.failure.ok();
  };
  bucket.mu.Await(absl::Condition(&reached));
  GW_RETURN_IF_ERROR(bucket.failure);
  OpenRound* const open = bucket.Find(close.round);
  if (open == nullptr || bucket.version != close.round) {
    return absl::InternalError(absl::StrFormat("round %d closes at version %d", close.round, bucket.version));
  }
  DropUnfinished(bucket, *open);
  GW_RETURN_IF_ERROR(bucket.failure);  // one of them may have spoiled the accumulator
  if (open->committed != close.contributors) {
    return absl::InternalError(absl::StrFormat("round %d closes with %d frames, but %d are merged into it", close.round,
                                               close.contributors, open->committed));
  }
  if (open->learning_rates.empty()) open->learning_rates.resize(parts_.job.spec().optimizer().groups_size());
  closed->nonfinite = open->nonfinite;
  closed->plan_version = PlanVersionOf(close);
  if (open->replacement) {
    closed->update = ReplacingUpdateOf(bucket, *bucket.plans.Find(closed->plan_version), *open);
    return absl::OkStatus();
  }
  GW_ASSIGN_OR_RETURN(closed->update, open->accumulator->Finish(IdentityOf(bucket, *open), close.contributors));
  return absl::OkStatus();
}

}  // namespace gradwire

// See open_rounds.h.
#include "server/flow/open_rounds.h"

#include <span>

#include "absl/strings/str_format.h"
#include "common/codec/plan/plan_window.h"

namespace gradwire {

FrameIdentity IdentityOf(const BucketState& bucket, const OpenRound& open) {
  FrameIdentity id;
  id.shard = static_cast<uint16_t>(bucket.layout->shard);
  id.bucket = bucket.layout->bucket;
  id.round = bucket.version;
  id.learning_rates = open.learning_rates;
  id.nonfinite_rounds = bucket.plans.nonfinite_rounds();
  return id;
}

void AbandonPartial(BucketState& bucket, OpenRound& open, MemberId member, InFlight* in_flight) {
  const auto it = open.partial.find(member);
  if (it == open.partial.end()) return;
  in_flight->Return(it->second.held_bytes);
  if (FrameAssembler* const assembler = it->second.assembler.get()) {
    assembler->Abandon();
    if (assembler->spoiled() && bucket.failure.ok()) {
      bucket.failure = absl::Status(absl::StatusCode::kResourceExhausted, "out of memory while taking back a frame");
    }
  }
  open.partial.erase(it);
}

bool HasBegun(const PushStream& stream, bool replaces, const OpenRound* open) {
  if (open == nullptr) return false;
  const auto it = open->partial.find(stream.member);
  return it != open->partial.end() && it->second.stream == stream.number && it->second.replaces == replaces;
}

bool IsSuperseded(const PushStream& stream, const OpenRound* open) {
  if (open == nullptr) return false;
  const auto it = open->partial.find(stream.member);
  return it != open->partial.end() && it->second.stream > stream.number;
}

absl::Status CheckUnmixed(const OpenRound& open, bool replaces) {
  const bool gradients = open.committed > 0 || open.nonfinite;
  if (replaces ? !gradients : !open.replacement) return absl::OkStatus();
  return absl::FailedPreconditionError(
      replaces ? "this frame replaces the parameters, but another worker has sent the gradients of a step: every "
                 "worker must replace them in the same step"
               : "this frame carries the gradients of a step, but another worker replaces the parameters in it: every "
                 "worker must replace them in the same step");
}

absl::Status StillFinishing(const Job& job, const BucketState& bucket, uint64_t round) {
  return absl::FailedPreconditionError(absl::StrFormat(
      "a frame of round %d, but this bucket is still finishing round %d: pull version %d of every bucket first", round,
      bucket.version, PlanVersion(job, round)));
}

absl::Status CheckLearningRates(const Job& job, const FrameAssembler& frame) {
  const size_t rates = frame.learning_rates().size();
  const size_t groups = static_cast<size_t>(job.spec().optimizer().groups_size());
  if (rates == groups) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("the frame carries %d learning rates; the job has %d parameter groups", rates, groups));
}

}  // namespace gradwire

// Rounds in which workers replace the parameters; see job_shard.h and proto/ROUNDS.md, "Replaced parameters".
// Every worker of the round abstains with the same values: the first whole frame of a bucket brings them, the others
// are compared with it. The round's update frame then carries parameters.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/frame/parameters.h"
#include "common/codec/update/update.h"
#include "common/job/round_mode.h"
#include "server/job/job_shard.h"

namespace gradwire {

absl::Status JobShard::CheckReplacement(const wire::FrameHeader& header) const {
  FeatureSet asked{Feature::kReplaceParameters};
  if (environment_.device != nullptr) asked.Add(Feature::kServersOnGpu);
  GW_RETURN_IF_ERROR(job_.CheckGoesWith(asked));
  if (CarriesValues(job_, header.round)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrFormat("parameters cannot be replaced in round %d, which calibrates", header.round));
}

absl::Status JobShard::CheckUnmixed(const OpenRound& open, bool replaces) {
  const bool gradients = open.committed > 0 || open.nonfinite;
  if (replaces ? !gradients : !open.replacement) return absl::OkStatus();
  return absl::FailedPreconditionError(
      replaces ? "this frame replaces the parameters, but another worker has sent the gradients of a step: every "
                 "worker must replace them in the same step"
               : "this frame carries the gradients of a step, but another worker replaces the parameters in it: every "
                 "worker must replace them in the same step");
}

JobShard::Ack JobShard::PushReplacement(PushStream& stream, const wire::Chunk& chunk, std::span<const Bytes> received) {
  const wire::FrameHeader& header = chunk.header;
  BucketState& bucket = *buckets_[header.bucket];
  const bool last = (header.flags & wire::kLastChunk) != 0;
  RoundActions actions;
  absl::StatusOr<PushVerdict> verdict = PushVerdict::kAccept;
  {
    absl::MutexLock lock(&bucket.mu);
    OpenRound* const open = bucket.Find(header.round);
    const bool begun = open != nullptr && open->partial.contains(stream.member);
    if (absl::Status status = CheckReplacement(header); !status.ok()) {
      verdict = status;
    } else if (header.chunk == 0 || !begun) {
      verdict = Begin(bucket, open, stream, header);
    }
    if (verdict.ok() && *verdict == PushVerdict::kDuplicate) {
      verdict = absl::FailedPreconditionError("a frame with gradients of this round came from this worker before");
    }
    if (verdict.ok() && *verdict == PushVerdict::kAccept) {
      verdict = HoldReplacement(bucket, *open, stream, header, received, &actions);
    }
  }
  Run(actions);
  if (!verdict.ok()) return Refuse(stream, header, verdict.status());
  if (last) return Acknowledge(stream, header, *verdict);
  if (*verdict == PushVerdict::kNotIncluded) {
    stream.skipped[header.bucket] = {.round = header.round, .not_included = true};
  }
  return std::nullopt;
}

absl::StatusOr<PushVerdict> JobShard::HoldReplacement(BucketState& bucket, OpenRound& open, const PushStream& stream,
                                                      const wire::FrameHeader& header, std::span<const Bytes> received,
                                                      RoundActions* actions) {
  PartialFrame& partial = open.partial.at(stream.member);
  const uint64_t size = TotalSize(received);
  GW_RETURN_IF_ERROR(CheckInFlight(size));
  if (partial.held_bytes + size > MaxUploadBytes(bucket.layout->elements)) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("parameters of %d bytes and more; those of %d elements take at most %d",
                        partial.held_bytes + size, bucket.layout->elements, MaxUploadBytes(bucket.layout->elements)));
  }
  partial.parameters.push_back(wire::Flatten(received));
  partial.held_bytes += size;
  in_flight_bytes_ += size;
  if ((header.flags & wire::kLastChunk) == 0) return PushVerdict::kAccept;
  GW_RETURN_IF_ERROR(CheckUnmixed(open, true));
  std::optional<Replacement> first;
  GW_RETURN_IF_ERROR(TakeReplacement(bucket, open, stream, header.round, partial.parameters, &first));
  PushVerdict verdict;
  {
    absl::MutexLock lock(&mu_);
    const TimeNs now = environment_.clock->Now();
    GW_ASSIGN_OR_RETURN(verdict, machine_.Abstain(stream.member, header.bucket, header.round, now, actions));
    machine_.Renew(stream.member, now);
  }
  // The bucket closes with `actions`, if not later.
  if (verdict == PushVerdict::kAccept && first) open.replacement = std::move(first);
  AbandonPartial(bucket, open, stream.member);
  return verdict;
}

absl::Status JobShard::TakeReplacement(const BucketState& bucket, const OpenRound& open, const PushStream& stream,
                                       uint64_t round, std::span<const Bytes> chunks,
                                       std::optional<Replacement>* first) const {
  Replacement replacement;
  replacement.worker = stream.worker;
  const uint64_t bytes = bucket.layout->elements * sizeof(float);
  // The values, and from the end of the round the update frame that carries them.
  if (!open.replacement && environment_.account != nullptr &&
      !MemoryAccount::Resize(environment_.account, 2 * bytes + bytes / 4, &replacement.share)) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "no memory for the %d bytes of parameters that replace others: raise --memory-limit-bytes, or delete jobs",
        bytes));
  }
  replacement.values.resize(bucket.layout->elements);
  GW_RETURN_IF_ERROR(
      DecodeParameters(chunks, job_, *bucket.layout, round, {.parameter = replacement.values.data()}).status());
  if (!open.replacement) {
    *first = std::move(replacement);
    return absl::OkStatus();
  }
  // A bucket may have no elements, and then no array to compare.
  if (bytes == 0 || std::memcmp(open.replacement->values.data(), replacement.values.data(), bytes) == 0) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrFormat(
      "other parameters than worker '%s' replaces them by: every worker must give the same values, to the last bit",
      open.replacement->worker));
}

UpdateFrame JobShard::FinishReplacement(BucketState& bucket, const RoundPlan& plan, const OpenRound& open) const {
  FrameIdentity id = IdentityOf(bucket, open);
  ++id.nonfinite_rounds;
  return ReplacingUpdate(id, *bucket.layout, plan, open.replacement->values.data());
}

}  // namespace gradwire

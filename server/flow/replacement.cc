// See replacement.h.
#include "server/flow/replacement.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/frame/parameters.h"
#include "common/codec/update/update.h"
#include "common/job/round_mode.h"
#include "server/flow/open_rounds.h"

namespace gradwire {

absl::Status ReplacementIntake::CheckAllowed(const wire::FrameHeader& header) const {
  FeatureSet asked{Feature::kReplaceParameters};
  if (parts_.environment.device != nullptr) asked.Add(Feature::kServersOnGpu);
  GW_RETURN_IF_ERROR(parts_.job.CheckGoesWith(asked));
  if (CarriesValues(parts_.job, header.round)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrFormat("parameters cannot be replaced in round %d, which calibrates", header.round));
}

absl::StatusOr<PushVerdict> ReplacementIntake::Take(PushStream& stream, const wire::Chunk& chunk,
                                                    std::span<const Bytes> received, RoundActions* actions) {
  const wire::FrameHeader& header = chunk.header;
  BucketState& bucket = *parts_.buckets[header.bucket];
  absl::MutexLock lock(&bucket.mu);
  OpenRound* const open = bucket.Find(header.round);
  const bool begun = HasBegun(stream, /*replaces=*/true, open);
  GW_RETURN_IF_ERROR(CheckAllowed(header));
  PushVerdict verdict = PushVerdict::kAccept;
  if (header.chunk == 0 || !begun) {
    GW_ASSIGN_OR_RETURN(verdict, flow_.Begin(bucket, open, stream, header));
  }
  if (verdict == PushVerdict::kDuplicate) {
    return absl::FailedPreconditionError("a frame with gradients of this round came from this worker before");
  }
  if (verdict != PushVerdict::kAccept) return verdict;
  GW_RETURN_IF_ERROR(Keep(bucket, &open->partial.at(stream.member), received));
  if (!IsLast(header)) return PushVerdict::kAccept;
  return Complete(bucket, *open, stream, header, actions);
}

absl::Status ReplacementIntake::Keep(const BucketState& bucket, PartialFrame* partial,
                                     std::span<const Bytes> received) {
  const uint64_t size = TotalSize(received);
  GW_RETURN_IF_ERROR(parts_.in_flight.Check(size));
  if (partial->held_bytes + size > MaxUploadBytes(bucket.layout->elements)) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("parameters of %d bytes and more; those of %d elements take at most %d",
                        partial->held_bytes + size, bucket.layout->elements, MaxUploadBytes(bucket.layout->elements)));
  }
  partial->parameters.push_back(wire::Flatten(received));
  partial->held_bytes += size;
  parts_.in_flight.Add(size);
  return absl::OkStatus();
}

absl::StatusOr<PushVerdict> ReplacementIntake::Complete(BucketState& bucket, OpenRound& open, const PushStream& stream,
                                                        const wire::FrameHeader& header, RoundActions* actions) {
  GW_RETURN_IF_ERROR(CheckUnmixed(open, true));
  std::optional<Replacement> first;
  GW_RETURN_IF_ERROR(Decode(bucket, open, stream, header.round, open.partial.at(stream.member).parameters, &first));
  PushVerdict verdict;
  {
    absl::MutexLock lock(&parts_.mu);
    const TimeNs now = parts_.NowOfRounds();
    GW_ASSIGN_OR_RETURN(verdict, parts_.rounds->Abstain(stream.member, header.bucket, header.round, now, actions));
    parts_.rounds->Renew(stream.member, now);
  }
  // The bucket closes with `actions`, if not later.
  if (verdict == PushVerdict::kAccept && first) open.replacement = std::move(first);
  AbandonPartial(bucket, open, stream.member, &parts_.in_flight);
  return verdict;
}

absl::Status ReplacementIntake::Decode(const BucketState& bucket, const OpenRound& open, const PushStream& stream,
                                       uint64_t round, std::span<const Bytes> chunks,
                                       std::optional<Replacement>* first) const {
  Replacement replacement;
  replacement.worker = stream.worker;
  const uint64_t bytes = bucket.layout->elements * sizeof(float);
  // The values, and from the end of the round the update frame that carries them.
  if (!open.replacement && parts_.environment.account != nullptr &&
      !MemoryAccount::Resize(parts_.environment.account, 2 * bytes + bytes / 4, &replacement.share)) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "no memory for the %d bytes of parameters that replace others: raise --memory-limit-bytes, or delete jobs",
        bytes));
  }
  replacement.values.resize(bucket.layout->elements);
  GW_RETURN_IF_ERROR(
      DecodeParameters(chunks, parts_.job, *bucket.layout, round, {.parameter = replacement.values.data()}).status());
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

UpdateFrame ReplacingUpdateOf(BucketState& bucket, const RoundPlan& plan, const OpenRound& open) {
  FrameIdentity id = IdentityOf(bucket, open);
  ++id.nonfinite_rounds;
  return ReplacingUpdate(id, *bucket.layout, plan, open.replacement->values.data());
}

}  // namespace gradwire

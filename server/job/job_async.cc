// The way of a frame into its bucket with asynchronous rounds: it is held until it is whole, then merged alone; see
// job_shard.h. Frames that were computed on different versions are encoded by different plans and cannot share an
// accumulator, and one that waits for its last chunk would hold up the others.
#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_format.h"
#include "common/base/failpoint.h"
#include "common/base/status_macros.h"
#include "common/job/round_mode.h"
#include "server/job/job_shard.h"

namespace gradwire {
namespace {

// What the plan of an older version does not know and the newest does. Nothing was sent for runs without an exponent,
// so it only matters to the plan of the version that follows.
RoundPlan Completed(RoundPlan plan, const RoundPlan& newest) {
  for (size_t run = 0; run < std::min(plan.exponents.size(), newest.exponents.size()); ++run) {
    if (plan.exponents[run] == kUncalibrated) plan.exponents[run] = newest.exponents[run];
  }
  return plan;
}

}  // namespace

absl::StatusOr<PushVerdict> JobShard::Hold(BucketState& bucket, PushStream& stream, const wire::Chunk& chunk,
                                           std::span<const Bytes> received, RoundActions* actions, bool* complete) {
  std::map<MemberId, PartialFrame>& unfinished = bucket.open[0].partial;
  PartialFrame& partial = unfinished.at(stream.member);
  const uint64_t chunk_bytes = chunk.bytes.size();
  if (chunk.header.chunk != partial.held.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("chunk %d came where chunk %d was expected", chunk.header.chunk, partial.held.size()));
  }
  if (partial.held_bytes + chunk_bytes > environment_.frame_limit_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("a frame of %d bytes and more; the limit is %d: use smaller "
                        "buckets",
                        partial.held_bytes + chunk_bytes, environment_.frame_limit_bytes));
  }
  GW_RETURN_IF_ERROR(CheckInFlight(chunk_bytes));
  partial.held.emplace_back(received.begin(), received.end());
  GW_FAILPOINT("push.chunk_merged");
  partial.held_bytes += chunk_bytes;
  in_flight_bytes_ += chunk_bytes;
  if ((chunk.header.flags & wire::kLastChunk) == 0) return PushVerdict::kAccept;
  PartialFrame whole = std::move(partial);
  unfinished.erase(stream.member);
  const absl::Cleanup let_go = [this, &whole] { in_flight_bytes_ -= whole.held_bytes; };
  absl::StatusOr<PushVerdict> verdict = MergeHeld(bucket, stream, whole.held, chunk, actions);
  *complete = verdict.ok();
  return verdict;
}

absl::StatusOr<PushVerdict> JobShard::MergeHeld(BucketState& bucket, const PushStream& stream,
                                                const std::vector<std::vector<Bytes>>& held, const wire::Chunk& last,
                                                RoundActions* actions) {
  const wire::FrameHeader& header = last.header;
  OpenRound& open = bucket.open[0];
  const auto free = [&bucket, &open]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) {
    return open.round == OpenRound::kNone || !bucket.failure.ok();
  };
  bucket.mu.Await(absl::Condition(&free));
  GW_RETURN_IF_ERROR(bucket.failure);
  PushVerdict verdict;
  {
    // Others may have made versions since its first chunk came.
    absl::MutexLock lock(&mu_);
    GW_ASSIGN_OR_RETURN(verdict, machine_.Classify(stream.member, header.bucket, header.round));
  }
  std::vector<uint8_t> scratch;
  if (verdict == PushVerdict::kDuplicate) {  // another stream of the worker has brought it meanwhile
    uint32_t digest = 0;
    for (size_t i = 0; i + 1 < held.size(); ++i) {
      GW_ASSIGN_OR_RETURN(const wire::Chunk chunk, wire::ParseReceived(held[i], &scratch));
      digest = ExtendDigest(chunk, digest);
    }
    absl::MutexLock lock(&mu_);
    GW_RETURN_IF_ERROR(machine_.Repeat(stream.member, header.bucket, header.round, ExtendDigest(last, digest)));
    return verdict;
  }
  const RoundPlan* const plan = bucket.plans.Find(header.round);
  if (verdict == PushVerdict::kNotIncluded || plan == nullptr) return PushVerdict::kNotIncluded;
  open.accumulator->Open(header.round, Completed(*plan, bucket.plans.newest()));
  FrameAssembler assembler(bucket.codec.get(), bucket.layout, open.accumulator.get(), plan, header.round,
                           environment_.frame_limit_bytes);
  for (size_t i = 0; i + 1 < held.size(); ++i) {
    GW_ASSIGN_OR_RETURN(const wire::Chunk chunk, wire::ParseReceived(held[i], &scratch));
    GW_RETURN_IF_ERROR(assembler.Add(chunk, held[i]));
  }
  GW_RETURN_IF_ERROR(assembler.Add(last, held.back()));
  if (!assembler.complete()) {
    return absl::InvalidArgumentError("the last chunk came, but the frame does not cover its bucket");
  }
  open.learning_rates.clear();
  open.learning_rates.reserve(assembler.learning_rates().size());
  {
    absl::MutexLock lock(&mu_);
    GW_RETURN_IF_ERROR(FixLearningRates(open, stream.member, assembler).status());
    GW_ASSIGN_OR_RETURN(verdict, machine_.Complete(stream.member, header.bucket, header.round, assembler.digest(),
                                                   environment_.clock->Now(), actions));
    machine_.Renew(stream.member, environment_.clock->Now());
    if (verdict == PushVerdict::kAccept) ++totals_[stream.member].frames;
  }
  if (verdict != PushVerdict::kAccept) return verdict;
  open.learning_rates.assign(assembler.learning_rates().begin(), assembler.learning_rates().end());
  assembler.Commit();
  open.committed = 1;
  open.round = bucket.version;
  return verdict;
}

}  // namespace gradwire

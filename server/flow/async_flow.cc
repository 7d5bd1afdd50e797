// See async_flow.h.
#include "server/flow/async_flow.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_format.h"
#include "common/base/failpoint.h"
#include "common/base/status_macros.h"
#include "server/flow/open_rounds.h"

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

absl::Status AsyncFlow::BeginPartial(BucketState&, OpenRound* open, PushStream& stream, const wire::FrameHeader&) {
  open->partial[stream.member].stream = stream.number;
  return absl::OkStatus();
}

absl::StatusOr<PushVerdict> AsyncFlow::Take(BucketState& bucket, OpenRound& open, PushStream& stream,
                                            const wire::Chunk& chunk, std::span<const Bytes> received,
                                            RoundActions* actions, bool* complete) {
  PartialFrame& partial = open.partial.at(stream.member);
  const uint64_t chunk_bytes = chunk.bytes.size();
  if (chunk.header.chunk != partial.chunks.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("chunk %d came where chunk %d was expected", chunk.header.chunk, partial.chunks.size()));
  }
  const uint64_t limit = parts_.environment.frame_limit_bytes;
  if (partial.held_bytes + chunk_bytes > limit) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("a frame of %d bytes and more; the limit is %d: use smaller "
                        "buckets",
                        partial.held_bytes + chunk_bytes, limit));
  }
  GW_RETURN_IF_ERROR(parts_.in_flight.Check(chunk_bytes));
  partial.chunks.emplace_back(received.begin(), received.end());
  GW_FAILPOINT("push.chunk_merged");
  partial.held_bytes += chunk_bytes;
  parts_.in_flight.Add(chunk_bytes);
  if (!IsLast(chunk.header)) return PushVerdict::kAccept;
  PartialFrame whole = std::move(partial);
  open.partial.erase(stream.member);
  const absl::Cleanup let_go = [this, &whole] { parts_.in_flight.Return(whole.held_bytes); };
  absl::StatusOr<PushVerdict> verdict = MergeWhole(bucket, open, stream, whole.chunks, chunk, actions);
  *complete = verdict.ok();
  return verdict;
}

absl::StatusOr<PushVerdict> AsyncFlow::MergeWhole(BucketState& bucket, OpenRound& open, const PushStream& stream,
                                                  const std::vector<std::vector<Bytes>>& chunks,
                                                  const wire::Chunk& last, RoundActions* actions) {
  const wire::FrameHeader& header = last.header;
  const auto free = [&bucket, &open]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) {
    return open.round == OpenRound::kNone || !bucket.failure.ok();
  };
  bucket.mu.Await(absl::Condition(&free));
  GW_RETURN_IF_ERROR(bucket.failure);
  PushVerdict verdict;
  {
    // Others may have made versions since its first chunk came.
    absl::MutexLock lock(&parts_.mu);
    GW_ASSIGN_OR_RETURN(verdict, parts_.rounds->Classify(stream.member, header.bucket, header.round));
  }
  if (verdict == PushVerdict::kDuplicate) return Repeat(stream, chunks, last);
  const RoundPlan* const plan = bucket.plans.Find(header.round);
  if (verdict == PushVerdict::kNotIncluded || plan == nullptr) return PushVerdict::kNotIncluded;
  open.accumulator->Open(header.round, Completed(*plan, bucket.plans.newest()));
  FrameAssembler assembler(bucket.codec.get(), bucket.layout, open.accumulator.get(), plan, header.round,
                           parts_.environment.frame_limit_bytes);
  std::vector<uint8_t> scratch;
  for (size_t i = 0; i + 1 < chunks.size(); ++i) {
    GW_ASSIGN_OR_RETURN(const wire::Chunk chunk, wire::ParseReceived(chunks[i], &scratch));
    GW_RETURN_IF_ERROR(assembler.Add(chunk, chunks[i]));
  }
  GW_RETURN_IF_ERROR(assembler.Add(last, chunks.back()));
  if (!assembler.complete()) {
    return absl::InvalidArgumentError("the last chunk came, but the frame does not cover its bucket");
  }
  open.learning_rates.clear();
  GW_RETURN_IF_ERROR(CheckLearningRates(parts_.job, assembler));
  open.learning_rates.reserve(assembler.learning_rates().size());  // from here on nothing may fail
  GW_ASSIGN_OR_RETURN(verdict, Complete(stream, header, assembler.digest(), actions));
  if (verdict != PushVerdict::kAccept) return verdict;
  open.learning_rates.assign(assembler.learning_rates().begin(), assembler.learning_rates().end());
  assembler.Commit();
  open.committed = 1;
  open.round = bucket.version;
  return verdict;
}

absl::StatusOr<PushVerdict> AsyncFlow::Repeat(const PushStream& stream, const std::vector<std::vector<Bytes>>& chunks,
                                              const wire::Chunk& last) const {
  std::vector<uint8_t> scratch;
  uint32_t digest = 0;
  for (size_t i = 0; i + 1 < chunks.size(); ++i) {
    GW_ASSIGN_OR_RETURN(const wire::Chunk chunk, wire::ParseReceived(chunks[i], &scratch));
    digest = ExtendDigest(chunk, digest);
  }
  absl::MutexLock lock(&parts_.mu);
  GW_RETURN_IF_ERROR(
      parts_.rounds->Repeat(stream.member, last.header.bucket, last.header.round, ExtendDigest(last, digest)));
  return PushVerdict::kDuplicate;
}

uint64_t AsyncFlow::MadeBy(const wire::FrameHeader& header, PushVerdict verdict, std::optional<uint64_t> closed) const {
  switch (verdict) {
    case PushVerdict::kAccept:
      return closed ? *closed + 1 : 0;
    case PushVerdict::kNotIncluded:  // it lost against a version that may not be there yet
      return header.round + 1;
    case PushVerdict::kDuplicate:
      break;
  }
  absl::MutexLock lock(&parts_.mu);
  return parts_.rounds->NextVersionOf(header.bucket);
}

}  // namespace gradwire

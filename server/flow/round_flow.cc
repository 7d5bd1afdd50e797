// See round_flow.h.
#include "server/flow/round_flow.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/failpoint.h"
#include "common/base/status_macros.h"
#include "server/flow/open_rounds.h"

namespace gradwire {
namespace {

absl::Status OtherRates(std::span<const float> rates, std::span<const float> others, const std::string& of) {
  size_t g = 0;
  while (rates[g] == others[g]) ++g;
  return absl::InvalidArgumentError(absl::StrFormat(
      "learning rate %.9g of group %d differs from %.9g of worker '%s', which is in the job for longer: "
      "all workers follow one schedule. One that comes in later, or again, takes it up where the job is: "
      "start_step of its optimizer or session says at which step",
      rates[g], g, others[g], of));
}

}  // namespace

absl::Status RoundFlow::BeginPartial(BucketState& bucket, OpenRound* open, PushStream& stream,
                                     const wire::FrameHeader& header) {
  if (open == nullptr) return StillFinishing(parts_.job, bucket, header.round);
  const bool replaces = (header.flags & wire::kReplace) != 0;
  GW_RETURN_IF_ERROR(CheckUnmixed(*open, replaces));
  PartialFrame& partial = open->partial[stream.member];
  partial.stream = stream.number;
  partial.replaces = replaces;
  if (replaces) return absl::OkStatus();
  partial.assembler = std::make_unique<FrameAssembler>(bucket.codec.get(), bucket.layout, open->accumulator.get(),
                                                       bucket.plans.OfRound(parts_.job, header.round), header.round,
                                                       parts_.environment.frame_limit_bytes);
  return absl::OkStatus();
}

absl::StatusOr<PushVerdict> RoundFlow::Take(BucketState& bucket, OpenRound& open, PushStream& stream,
                                            const wire::Chunk& chunk, std::span<const Bytes> received,
                                            RoundActions* actions, bool* complete) {
  if (chunk.header.chunk == 0 && IsFull(open, stream.member)) {
    AbandonPartial(bucket, open, stream.member, &parts_.in_flight);
    absl::MutexLock lock(&parts_.mu);
    GW_ASSIGN_OR_RETURN(
        const PushVerdict verdict,
        parts_.rounds->Abstain(stream.member, chunk.header.bucket, chunk.header.round, parts_.NowOfRounds(), actions));
    return verdict == PushVerdict::kAccept ? PushVerdict::kNotIncluded : verdict;
  }
  PartialFrame& partial = open.partial.at(stream.member);
  const uint64_t chunk_bytes = chunk.bytes.size();
  GW_RETURN_IF_ERROR(parts_.in_flight.Check(chunk_bytes));
  GW_RETURN_IF_ERROR(partial.assembler->Add(chunk, received));
  GW_FAILPOINT("push.chunk_merged");
  partial.held_bytes += chunk_bytes;
  parts_.in_flight.Add(chunk_bytes);
  if (!partial.assembler->complete()) {
    if (!IsLast(chunk.header)) return PushVerdict::kAccept;
    return absl::InvalidArgumentError("the last chunk came, but the frame does not cover its bucket");
  }
  GW_RETURN_IF_ERROR(CheckUnmixed(open, false));
  const std::span<const float> rates = partial.assembler->learning_rates();
  GW_RETURN_IF_ERROR(CheckLearningRates(parts_.job, *partial.assembler));
  GW_ASSIGN_OR_RETURN(const bool takes_rates, TakesRates(open, stream.member, rates));
  open.learning_rates.reserve(rates.size());  // from here on nothing may fail
  GW_ASSIGN_OR_RETURN(const PushVerdict verdict, Complete(stream, chunk.header, partial.assembler->digest(), actions));
  *complete = true;
  if (verdict != PushVerdict::kAccept) {
    AbandonPartial(bucket, open, stream.member, &parts_.in_flight);
    return verdict;
  }
  if (takes_rates) {
    open.learning_rates.assign(rates.begin(), rates.end());
    open.rates_of = stream.member;
  }
  partial.assembler->Commit();
  ++open.committed;
  parts_.in_flight.Return(partial.held_bytes);
  open.partial.erase(stream.member);
  return verdict;
}

bool RoundFlow::IsFull(const OpenRound& open, MemberId member) const {
  const auto others = std::count_if(open.partial.begin(), open.partial.end(), [member](const auto& partial) {
    return partial.first != member && !partial.second.replaces;
  });
  return open.committed + static_cast<uint64_t>(others) >= parts_.job.spec().max_workers();
}

absl::StatusOr<bool> RoundFlow::TakesRates(const OpenRound& open, MemberId member, std::span<const float> rates) {
  absl::MutexLock lock(&parts_.mu);
  if (const auto told = other_rates_.find(member); told != other_rates_.end()) {
    const absl::Status refused = std::move(told->second);
    other_rates_.erase(told);
    return refused;
  }
  if (open.learning_rates.empty()) return true;
  // A worker that skipped rounds may be behind in its schedule: with a quorum the first frame decides for all.
  if (parts_.job.spec().rounds().quorum() > 0) return false;
  if (std::equal(rates.begin(), rates.end(), open.learning_rates.begin())) return false;
  // A worker that was started anew has its schedule begin anew: that ends it, and not those who are in the job since.
  const Membership& members = parts_.rounds->membership();
  const Member* const mine = members.Get(member);
  const Member* const theirs = members.Get(open.rates_of);
  if (mine == nullptr || theirs == nullptr) return true;  // it has gone
  if (theirs->sequence < mine->sequence) return OtherRates(rates, open.learning_rates, theirs->worker);
  std::erase_if(other_rates_, [&members](const auto& other) { return members.Get(other.first) == nullptr; });
  other_rates_[theirs->id] = OtherRates(open.learning_rates, rates, mine->worker);
  return true;
}

void RoundFlow::DropUnfinished(BucketState& bucket, OpenRound& open) {
  while (!open.partial.empty()) AbandonPartial(bucket, open, open.partial.begin()->first, &parts_.in_flight);
}

void RoundFlow::OpenNext(BucketState& bucket) {
  for (uint64_t round = bucket.version; round < bucket.version + bucket.open.size(); ++round) {
    const RoundPlan* plan = bucket.plans.OfRound(parts_.job, round);
    if (plan == nullptr || bucket.Find(round) != nullptr) continue;
    OpenRound& open = bucket.open[round % bucket.open.size()];
    open.round = round;
    open.committed = 0;
    open.learning_rates.clear();
    open.nonfinite = false;
    open.replacement.reset();
    open.accumulator->Open(round, *plan);
  }
}

}  // namespace gradwire

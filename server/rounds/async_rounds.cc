// See async_rounds.h.
#include "server/rounds/async_rounds.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"

namespace gradwire {
AsyncRounds::AsyncRounds(const Rules& rules)
    : rules_(rules),
      membership_(rules.membership),
      history_(rules.buckets, kFramesKnown, rules.membership.max_workers),
      initialization_(rules.buckets, rules.needs_initialization),
      versions_(rules.buckets),
      recovered_(rules.buckets) {}

uint64_t AsyncRounds::round() const {
  const auto least = std::min_element(versions_.begin(), versions_.end());
  return least == versions_.end() ? 0 : *least;
}

absl::StatusOr<Rounds::JoinOutcome> AsyncRounds::Enter(std::string_view worker, uint64_t incarnation,
                                                       bool may_initialize, TimeNs now, RoundActions* actions) {
  std::vector<Member> lost;
  for (const auto& [id, member] : membership_.members()) {
    if (member.worker == worker && member.incarnation != incarnation) lost.push_back(member);
  }
  GW_ASSIGN_OR_RETURN(const Membership::Joined joined, membership_.Join(worker, incarnation, 0, now));
  for (const Member& member : lost) history_.Drop(member.id);
  membership_.SetMayInitialize(joined.id, may_initialize);
  history_.Return(joined.id);
  Lose(lost, actions);
  return JoinOutcome{joined.id, 0, MustInitialize(joined.id), false};
}

absl::StatusOr<Rounds::JoinOutcome> AsyncRounds::Join(std::string_view worker, uint64_t incarnation,
                                                      uint64_t /*not_before*/, bool may_initialize, TimeNs now,
                                                      RoundActions* actions) {
  GW_ASSIGN_OR_RETURN(const JoinOutcome outcome, Enter(worker, incarnation, may_initialize, now, actions));
  history_.Begin(outcome.id);
  return outcome;
}

absl::Status AsyncRounds::CheckNothingLost(std::string_view worker, const ResumePoint& point) const {
  if (point.versions.size() > versions_.size()) {
    return absl::InvalidArgumentError(absl::StrFormat("worker '%s' names versions of %d buckets; the job has %d",
                                                      std::string(worker), point.versions.size(), versions_.size()));
  }
  for (size_t b = 0; b < point.versions.size(); ++b) {
    const uint64_t shared = point.from_before ? recovered_[b] : versions_[b];
    if (point.versions[b] <= shared) continue;
    return absl::DataLossError(absl::StrFormat(
        "worker '%s' has seen version %d of bucket %d, this shard was recovered at version %d: its disk lost what lies "
        "between; join again to start from what is here",
        std::string(worker), point.versions[b], b, shared));
  }
  return absl::OkStatus();
}

absl::StatusOr<Rounds::JoinOutcome> AsyncRounds::Resume(std::string_view worker, uint64_t incarnation,
                                                        const ResumePoint& point, TimeNs now, RoundActions* actions) {
  GW_RETURN_IF_ERROR(membership_.CheckNotSuperseded(worker, incarnation));
  GW_RETURN_IF_ERROR(CheckNothingLost(worker, point));
  if (!initialized()) {
    return absl::FailedPreconditionError(
        absl::StrFormat("worker '%s' cannot go on, this shard has no parameters yet: join again", std::string(worker)));
  }
  GW_ASSIGN_OR_RETURN(JoinOutcome outcome, Enter(worker, incarnation, false, now, actions));
  outcome.start_version = point.round;
  return outcome;
}

absl::StatusOr<Rounds::JoinOutcome> AsyncRounds::CatchUp(std::string_view worker, uint64_t, uint64_t, TimeNs,
                                                         RoundActions*) {
  return absl::FailedPreconditionError(absl::StrFormat(
      "worker '%s' asks to catch up: with asynchronous rounds a worker goes on with what it has (JoinRequest.resume)",
      std::string(worker)));
}

void AsyncRounds::Restore(const Recovered& recovered, TimeNs now) {
  versions_ = recovered.versions;
  recovered_ = recovered.versions;
  initialization_.Finish();
  history_.Forget(recovered.known_from);
  if (recovered.nothing_known_before > 0) history_.ForgetAll(recovered.nothing_known_before);
  for (const Recovered::Worker& worker : recovered.workers) {
    membership_.Join(worker.name, worker.incarnation, 0, now).IgnoreError();
    history_.Return(MakeMemberId(worker.name, worker.incarnation));
  }
}

void AsyncRounds::RestoreContribution(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest) {
  history_.Restore(id, bucket, round, digest);
}

void AsyncRounds::Leave(MemberId id, TimeNs, RoundActions* actions) {
  const Member* member = membership_.Get(id);
  if (member == nullptr) return;
  const std::vector<Member> lost = {*member};
  membership_.Remove(id);
  history_.Drop(id);
  Lose(lost, actions);
}

void AsyncRounds::Tick(TimeNs now, RoundActions* actions) {
  std::vector<Member> lost;
  for (const auto& [id, member] : membership_.members()) {
    if (member.lease_end <= now) lost.push_back(member);
  }
  membership_.Expire(now);
  for (const Member& member : lost) history_.Depart(member.id);
  if (!lost.empty()) Lose(lost, actions);
}

void AsyncRounds::Lose(const std::vector<Member>& lost, RoundActions* actions) {
  actions->lost.insert(actions->lost.end(), lost.begin(), lost.end());
  if (initialization_.Elect(membership_)) actions->restart_initialization = true;
}

void AsyncRounds::SetMayInitialize(MemberId id, bool may_initialize, RoundActions* actions) {
  membership_.SetMayInitialize(id, may_initialize);
  Lose({}, actions);
}

absl::Status AsyncRounds::CheckInitializer(MemberId id, uint32_t bucket) const {
  return initialization_.Check(membership_, id, bucket);
}

void AsyncRounds::Initialized(MemberId id, uint32_t bucket, TimeNs, RoundActions*) {
  if (CheckInitializer(id, bucket).ok()) initialization_.Uploaded(bucket);
}

absl::StatusOr<PushVerdict> AsyncRounds::Classify(MemberId id, uint32_t bucket, uint64_t round) const {
  if (bucket >= rules_.buckets) {
    return absl::InvalidArgumentError(
        absl::StrFormat("bucket %d does not exist: this job has %d", bucket, rules_.buckets));
  }
  if (membership_.Get(id) == nullptr) {
    return absl::NotFoundError("the worker is not a member of this job (it left, or its lease ended): join again");
  }
  if (!initialized()) {
    return absl::FailedPreconditionError(
        absl::StrFormat("bucket %d: a frame came, but this shard has no parameters yet: pull them first", bucket));
  }
  const uint64_t version = versions_[bucket];
  if (round > version) {
    return absl::FailedPreconditionError(
        absl::StrFormat("bucket %d: a frame computed on version %d, but version %d is the newest: pull the parameters "
                        "before computing on them",
                        bucket, round, version));
  }
  if (rules_.recognize_repeats && history_.Find(id, bucket, round) != nullptr) return PushVerdict::kDuplicate;
  if (!history_.Knows(id, round)) {
    return absl::DataLossError(
        absl::StrFormat("bucket %d: it is no longer known whether a frame of this worker computed on version %d was "
                        "merged (version %d is the newest): join as a new worker",
                        bucket, round, version));
  }
  const bool calibrated = round == 0 && version > 0;
  return calibrated || version - round >= rules_.window ? PushVerdict::kNotIncluded : PushVerdict::kAccept;
}

absl::Status AsyncRounds::Repeat(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest) const {
  return history_.CheckSame(id, bucket, round, digest);
}

absl::StatusOr<PushVerdict> AsyncRounds::Complete(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest, TimeNs,
                                                  RoundActions* actions) {
  GW_ASSIGN_OR_RETURN(const PushVerdict verdict, Classify(id, bucket, round));
  if (verdict == PushVerdict::kDuplicate) GW_RETURN_IF_ERROR(Repeat(id, bucket, round, digest));
  if (verdict != PushVerdict::kAccept) return verdict;
  RoundActions::Close close{bucket, versions_[bucket], 1, {{id, {true, digest, round}}}};
  actions->close.reserve(actions->close.size() + 1);
  history_.Note(id, bucket, round, digest);
  membership_.NoteFrame(id, round);
  actions->close.push_back(std::move(close));
  ++versions_[bucket];
  return verdict;
}

absl::StatusOr<PushVerdict> AsyncRounds::Abstain(MemberId id, uint32_t bucket, uint64_t round, TimeNs, RoundActions*) {
  return Classify(id, bucket, round);
}

}  // namespace gradwire

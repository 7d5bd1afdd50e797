// Who is waited for, what closes, what opens; see round.h.
#include "server/rounds/round.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"

namespace gradwire {

RoundMachine::RoundMachine(const Rules& rules)
    : rules_(rules),
      membership_(rules.membership),
      initialized_(!rules.needs_initialization),
      uploaded_(rules.buckets),
      current_(rules.buckets) {}

absl::StatusOr<RoundMachine::JoinOutcome> RoundMachine::Join(std::string_view worker, uint64_t incarnation,
                                                             uint64_t not_before, bool may_initialize, TimeNs now,
                                                             RoundActions* actions) {
  if (not_before > round_ + kMaxRoundsAhead) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "worker '%s' asks to start at round %d; round %d is open and at most %d rounds ahead are allowed",
        std::string(worker), not_before, round_, kMaxRoundsAhead));
  }
  // The incarnation that this one replaces is gone before the newcomer's first round is decided.
  std::vector<Member> lost;
  for (const auto& [id, member] : membership_.members()) {
    if (member.worker == worker && member.incarnation != incarnation) lost.push_back(member);
  }
  for (const Member& member : lost) membership_.Remove(member.id);
  absl::StatusOr<Membership::Joined> joined = membership_.Join(worker, incarnation, StartRoundOfNewcomer(), now);
  if (!joined.ok()) return joined.status();
  membership_.Postpone(joined->id, not_before);
  membership_.SetMayInitialize(joined->id, may_initialize);
  Lose(lost, actions);
  JoinOutcome outcome;
  outcome.id = joined->id;
  outcome.start_version = membership_.Get(joined->id)->start_round;
  outcome.must_initialize = MustInitialize(joined->id);
  outcome.waiting_for_workers = !open_ && membership_.members().size() < rules_.min_workers;
  return outcome;
}

absl::StatusOr<RoundMachine::JoinOutcome> RoundMachine::Resume(std::string_view worker, uint64_t incarnation,
                                                               uint64_t round, TimeNs now, RoundActions* actions) {
  if (round > round_) {
    return absl::DataLossError(absl::StrFormat(
        "worker '%s' has seen version %d, this shard was recovered at version %d: its disk lost what lies "
        "between; join again to start from what is here",
        std::string(worker), round, round_));
  }
  if (!initialized_ || round + 1 < round_) {
    return absl::FailedPreconditionError(
        absl::StrFormat("worker '%s' cannot go on with round %d, this shard %s: join again", std::string(worker), round,
                        initialized_ ? absl::StrFormat("is at round %d", round_) : "has no parameters yet"));
  }
  GW_ASSIGN_OR_RETURN(JoinOutcome outcome, Join(worker, incarnation, 0, false, now, actions));
  membership_.Advance(outcome.id, round_);
  outcome.start_version = round;
  return outcome;
}

void RoundMachine::Restore(const Recovered& recovered, TimeNs now) {
  const auto included = [](const Contributions& contributions) {
    return static_cast<uint32_t>(
        std::count_if(contributions.begin(), contributions.end(), [](const auto& c) { return c.second.included; }));
  };
  round_ = recovered.round;
  initialized_ = true;
  previous_.assign(rules_.buckets, {});
  for (uint32_t b = 0; b < rules_.buckets; ++b) {
    const Recovered::Bucket& bucket = recovered.buckets[b];
    current_[b] = {bucket.closed, included(bucket.current), bucket.current};
    previous_[b] = {true, included(bucket.previous), bucket.previous};
    closed_ += bucket.closed ? 1 : 0;
  }
  // Round 0 opens when min_workers have joined, again.
  open_ = round_ > 0 || closed_ > 0;
  for (const Recovered::Worker& worker : recovered.workers) {
    membership_.Join(worker.name, worker.incarnation, round_, now).IgnoreError();
  }
}

RoundMachine::Contributions RoundMachine::ContributionsOf(uint32_t bucket, uint64_t round) const {
  const std::vector<BucketRound>* buckets = BucketsOf(round);
  return buckets == nullptr || bucket >= buckets->size() ? Contributions() : (*buckets)[bucket].contributions;
}

uint64_t RoundMachine::StartRoundOfNewcomer() const {
  if (!open_) return round_;
  return MembersOfRound() == 0 && closed_ == 0 ? round_ : round_ + 1;
}

void RoundMachine::Leave(MemberId id, RoundActions* actions) {
  const Member* member = membership_.Get(id);
  if (member == nullptr) return;
  const std::vector<Member> lost = {*member};
  membership_.Remove(id);
  Lose(lost, actions);
}

void RoundMachine::Tick(TimeNs now, RoundActions* actions) {
  std::vector<Member> lost;
  for (const auto& [id, member] : membership_.members()) {
    if (member.lease_end <= now) lost.push_back(member);
  }
  if (lost.empty()) return;
  membership_.Expire(now);
  Lose(lost, actions);
}

void RoundMachine::SetMayInitialize(MemberId id, bool may_initialize, RoundActions* actions) {
  membership_.SetMayInitialize(id, may_initialize);
  ElectInitializer(actions);
}

void RoundMachine::Lose(const std::vector<Member>& lost, RoundActions* actions) {
  actions->lost.insert(actions->lost.end(), lost.begin(), lost.end());
  ElectInitializer(actions);
  Advance(actions);
}

void RoundMachine::ElectInitializer(RoundActions* actions) {
  if (initialized_) return;
  const Member* chosen = initializer_ ? membership_.Get(*initializer_) : nullptr;
  if (chosen != nullptr && chosen->may_initialize) return;
  if (uploaded_count_ > 0) {
    // A mixture of two workers' initial parameters would be nobody's: start over.
    uploaded_.assign(rules_.buckets, false);
    uploaded_count_ = 0;
    actions->restart_initialization = true;
  }
  const Member* first = membership_.FirstInitializer();
  initializer_ = first == nullptr ? std::nullopt : std::optional<MemberId>(first->id);
}

absl::Status RoundMachine::CheckInitializer(MemberId id, uint32_t bucket) const {
  const Member* member = membership_.Get(id);
  if (member == nullptr) return absl::NotFoundError("not a member of this job: join again");
  if (!rules_.needs_initialization) {
    return absl::FailedPreconditionError(
        "this job keeps no parameters (OPTIMIZER_NONE): there is nothing to initialize");
  }
  if (initialized_) return absl::AlreadyExistsError("the parameters of this job are initialized: pull them");
  if (initializer_ != id) {
    const Member* chosen = initializer_ ? membership_.Get(*initializer_) : nullptr;
    if (chosen == nullptr) {
      return absl::FailedPreconditionError(
          absl::StrFormat("no worker is chosen yet to send the initial parameters; '%s' did not say that it may "
                          "(JoinRequest.may_initialize): pull them",
                          member->worker));
    }
    return absl::FailedPreconditionError(absl::StrFormat(
        "worker '%s' was chosen to send the initial parameters, not '%s': pull them", chosen->worker, member->worker));
  }
  if (bucket >= rules_.buckets) return absl::InvalidArgumentError(absl::StrFormat("no bucket %d", bucket));
  if (uploaded_[bucket]) return absl::AlreadyExistsError(absl::StrFormat("bucket %d is initialized", bucket));
  return absl::OkStatus();
}

void RoundMachine::Initialized(MemberId id, uint32_t bucket, RoundActions* actions) {
  if (!CheckInitializer(id, bucket).ok()) return;
  uploaded_[bucket] = true;
  if (++uploaded_count_ == rules_.buckets) initialized_ = true;
  Advance(actions);
}

absl::Status RoundMachine::CheckRound(MemberId id, uint32_t bucket, uint64_t round) const {
  if (bucket >= rules_.buckets) {
    return absl::InvalidArgumentError(
        absl::StrFormat("bucket %d does not exist: this job has %d", bucket, rules_.buckets));
  }
  const Member* member = membership_.Get(id);
  if (member == nullptr) {
    return absl::NotFoundError("the worker is not a member of this job (it left, or its lease ended): join again");
  }
  if (round > round_) {
    return absl::FailedPreconditionError(
        absl::StrFormat("bucket %d: a frame of round %d, but round %d is open: pull version %d of every bucket first",
                        bucket, round, round_, round));
  }
  if (round == round_ && member->start_round > round) {
    return absl::FailedPreconditionError(
        absl::StrFormat("bucket %d: a frame of round %d, but worker '%s' joined to start at round %d", bucket, round,
                        member->worker, member->start_round));
  }
  return absl::OkStatus();
}

const std::vector<RoundMachine::BucketRound>* RoundMachine::BucketsOf(uint64_t round) const {
  if (round == round_) return &current_;
  return round + 1 == round_ ? &previous_ : nullptr;
}

const RoundMachine::Contribution* RoundMachine::FindContribution(MemberId id, uint32_t bucket, uint64_t round) const {
  const std::vector<BucketRound>* buckets = BucketsOf(round);
  if (buckets == nullptr || bucket >= buckets->size()) return nullptr;
  const auto it = (*buckets)[bucket].contributions.find(id);
  return it == (*buckets)[bucket].contributions.end() ? nullptr : &it->second;
}

absl::StatusOr<PushVerdict> RoundMachine::Classify(MemberId id, uint32_t bucket, uint64_t round) const {
  GW_RETURN_IF_ERROR(CheckRound(id, bucket, round));
  const Contribution* seen = FindContribution(id, bucket, round);
  if (seen != nullptr && seen->included) return PushVerdict::kDuplicate;
  if (round < round_ || current_[bucket].closed) return PushVerdict::kNotIncluded;
  return PushVerdict::kAccept;
}

absl::Status RoundMachine::Repeat(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest) const {
  const Contribution* seen = FindContribution(id, bucket, round);
  if (seen == nullptr || !seen->included || seen->digest == digest) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrFormat("bucket %d round %d: a frame with digest 0x%08x of this worker was merged before, this one has "
                      "0x%08x: a repeat must be the same bytes",
                      bucket, round, seen->digest, digest));
}

absl::StatusOr<PushVerdict> RoundMachine::Complete(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest,
                                                   RoundActions* actions) {
  GW_ASSIGN_OR_RETURN(const PushVerdict verdict, Classify(id, bucket, round));
  if (verdict == PushVerdict::kDuplicate) GW_RETURN_IF_ERROR(Repeat(id, bucket, round, digest));
  if (verdict != PushVerdict::kAccept) return verdict;
  current_[bucket].contributions[id] = {true, digest};
  ++current_[bucket].included;
  CloseIfComplete(bucket, actions);
  return verdict;
}

absl::StatusOr<PushVerdict> RoundMachine::Abstain(MemberId id, uint32_t bucket, uint64_t round, RoundActions* actions) {
  GW_ASSIGN_OR_RETURN(const PushVerdict verdict, Classify(id, bucket, round));
  if (verdict != PushVerdict::kAccept) return verdict;
  current_[bucket].contributions[id] = {false, 0};
  CloseIfComplete(bucket, actions);
  return verdict;
}

void RoundMachine::CloseIfComplete(uint32_t bucket, RoundActions* actions) {
  if (!open_ || !Closable(current_[bucket])) return;
  current_[bucket].closed = true;
  actions->close.push_back({bucket, round_, current_[bucket].included});
  if (++closed_ == rules_.buckets) Advance(actions);
}

bool RoundMachine::Closable(const BucketRound& bucket) const {
  if (bucket.closed) return false;
  bool anyone = false;
  for (const auto& [id, member] : membership_.members()) {
    if (!InRound(member)) continue;
    if (!bucket.contributions.contains(id)) return false;
    anyone = true;
  }
  // Nobody is left in this round. It stays open for the next joiner to enter, unless somebody waits for a later one.
  return anyone || !membership_.members().empty();
}

void RoundMachine::Advance(RoundActions* actions) {
  ElectInitializer(actions);
  if (!open_) {
    if (!initialized_ || membership_.members().size() < rules_.min_workers || rules_.buckets == 0) return;
    open_ = true;
    actions->opened = round_;
  }
  for (;;) {
    for (uint32_t b = 0; b < rules_.buckets; ++b) {
      if (!Closable(current_[b])) continue;
      current_[b].closed = true;
      ++closed_;
      actions->close.push_back({b, round_, current_[b].included});
    }
    if (closed_ < rules_.buckets) return;
    ++round_;
    previous_ = std::move(current_);
    current_.assign(rules_.buckets, {});
    closed_ = 0;
    actions->opened = round_;
  }
}

uint32_t RoundMachine::MembersOfRound() const {
  const auto& members = membership_.members();
  return static_cast<uint32_t>(
      std::count_if(members.begin(), members.end(), [this](const auto& m) { return InRound(m.second); }));
}

bool RoundMachine::RoundHasContributions() const {
  return std::any_of(current_.begin(), current_.end(),
                     [](const BucketRound& b) { return b.closed || !b.contributions.empty(); });
}

}  // namespace gradwire

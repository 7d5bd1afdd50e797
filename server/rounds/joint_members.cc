// Who takes part, from when on, and who sends the initial parameters; see joint_rounds.h.
#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "server/rounds/joint_rounds.h"

namespace gradwire {

absl::StatusOr<JointRounds::JoinOutcome> JointRounds::Join(std::string_view worker, uint64_t incarnation,
                                                           uint64_t not_before, bool may_initialize, TimeNs now,
                                                           RoundActions* actions) {
  if (not_before > round_ + kMaxRoundsAhead) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "worker '%s' asks to start at round %d; round %d is open and at most %d rounds ahead are allowed",
        std::string(worker), not_before, round_, kMaxRoundsAhead));
  }
  GW_RETURN_IF_ERROR(membership_.CheckIdentity(worker, incarnation));
  // The incarnation that this one replaces is gone before the newcomer's first round is decided.
  std::vector<Member> lost;
  for (const auto& [id, member] : membership_.members()) {
    if (member.worker == worker && member.incarnation != incarnation) lost.push_back(member);
  }
  for (const Member& member : lost) {
    membership_.Remove(member.id);
    history_.Drop(member.id);
  }
  Regather(now);
  const MemberId id = MakeMemberId(worker, incarnation);
  const bool anew = membership_.Get(id) == nullptr;
  const uint64_t start = StartRoundOfNewcomer(worker, anew);
  GW_RETURN_IF_ERROR(membership_.Join(worker, incarnation, start, now).status());
  if (membership_.Get(id)->start_round == Membership::kNever) membership_.Advance(id, start);
  membership_.Postpone(id, not_before);
  if (anew && start == round_) NoteReturn(worker);
  if (std::exchange(deserted_, false) && !gather_until_) gather_until_ = now + rules_.membership.lease_ns;
  membership_.SetMayInitialize(id, may_initialize);
  history_.Return(id);
  Lose(lost, now, actions);
  return OutcomeOf(id);
}

JointRounds::JoinOutcome JointRounds::OutcomeOf(MemberId id) const {
  JoinOutcome outcome;
  outcome.id = id;
  outcome.start_version = membership_.Get(id)->start_round;
  outcome.must_initialize = MustInitialize(id);
  outcome.waiting_for_workers = !open_ && !Gathered();
  return outcome;
}

absl::Status JointRounds::CheckNothingLost(std::string_view worker, const ResumePoint& point) const {
  std::vector<uint64_t> seen(rules_.buckets, point.round);
  for (uint32_t bucket : point.seen) {
    if (point.from_before && bucket < seen.size()) ++seen[bucket];
  }
  for (uint32_t b = 0; b < rules_.buckets; ++b) {
    const uint64_t recovered = recovered_versions_.empty() ? 0 : recovered_versions_[b];
    const uint64_t here = point.from_before ? recovered : round_;
    if (seen[b] <= here) continue;
    return absl::DataLossError(absl::StrFormat(
        "worker '%s' has seen version %d%s, this shard was recovered at version %d: its disk lost what lies "
        "between; join again to start from what is here",
        std::string(worker), seen[b], seen[b] > point.round ? " of some buckets" : "", here));
  }
  return absl::OkStatus();
}

absl::StatusOr<JointRounds::JoinOutcome> JointRounds::Resume(std::string_view worker, uint64_t incarnation,
                                                             const ResumePoint& point, TimeNs now,
                                                             RoundActions* actions) {
  GW_RETURN_IF_ERROR(membership_.CheckNotSuperseded(worker, incarnation));
  GW_RETURN_IF_ERROR(CheckNothingLost(worker, point));
  const uint64_t round = point.round;
  if (!initialized()) {
    return absl::FailedPreconditionError(
        absl::StrFormat("worker '%s' cannot go on with round %d, this shard has no parameters yet: join again",
                        std::string(worker), round));
  }
  const bool over = round + rules_.rounds_per_step + rules_.staleness < round_;
  const MemberId id = MakeMemberId(worker, incarnation);
  // A request that was long on its way takes back no later round that the worker was told since, and waits for.
  const Member* const member = membership_.Get(id);
  const bool told_later = member != nullptr && member->start_round != Membership::kNever && member->start_round > round;
  if (over && !told_later) membership_.Postpone(id, Membership::kNever);
  GW_ASSIGN_OR_RETURN(JoinOutcome outcome, Join(worker, incarnation, 0, false, now, actions));
  if (told_later) {
    // Until it asks for another one.
  } else if (!over) {
    membership_.Advance(id, round_);
  } else if (rules_.needs_initialization) {
    membership_.Postpone(id, Membership::kNever);
    Advance(now, actions);
  }  // else there is nothing to catch up to: it is in a later round, as a newcomer, and follows the means kept until
     // then
  NoteAwaitedAlone(now);
  outcome.start_version = over ? round_ : round;
  return outcome;
}

absl::StatusOr<JointRounds::JoinOutcome> JointRounds::CatchUp(std::string_view worker, uint64_t incarnation,
                                                              uint64_t not_before, TimeNs now, RoundActions* actions) {
  GW_RETURN_IF_ERROR(membership_.CheckNotSuperseded(worker, incarnation));
  if (!initialized()) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "worker '%s' cannot catch up, this shard has no parameters yet: join again", std::string(worker)));
  }
  const MemberId id = MakeMemberId(worker, incarnation);
  const Member* const member = membership_.Get(id);
  // As in Resume.
  if (member != nullptr && member->start_round != Membership::kNever && member->start_round > round_) {
    not_before = std::max(not_before, member->start_round);
  }
  membership_.Postpone(id, Membership::kNever);
  return Join(worker, incarnation, not_before, false, now, actions);
}

uint64_t JointRounds::StartRoundOfNewcomer(std::string_view worker, bool anew) const {
  const auto counted_on = counted_on_.find(worker);
  const bool has_place = anew && counted_on != counted_on_.end() && !counted_on->second.came_back;
  uint64_t start = !open_ || has_place || MembersOfRound() == 0 ? round_ : round_ + 1;
  while (Find(start) != nullptr && (Find(start)->closed > 0 || Find(start)->heard.contains(worker))) ++start;
  return start;
}

void JointRounds::NoteReturn(std::string_view worker) {
  // Names that come and go while the round stays open are not all kept.
  const bool full = counted_on_.size() >= 2 * size_t{rules_.membership.max_workers};
  if (full && !counted_on_.contains(worker)) return;
  counted_on_[std::string(worker)].came_back = open_ && RoundHasContributions();
}

void JointRounds::NoteExpired(size_t lost, TimeNs now) {
  // Those of a run that was cut off go one after the other, within a lease of each other.
  std::erase_if(expired_, [&](TimeNs at) { return at < now - 2 * rules_.membership.lease_ns; });
  expired_.insert(expired_.end(), lost, now);
  const auto& members = membership_.members();
  const bool old_ones =
      std::any_of(members.begin(), members.end(), [this](const auto& m) { return m.second.start_round < round_; });
  if (gather_until_ == kEver || old_ones) return;
  deserted_ = members.empty();
  if (deserted_) gather_until_.reset();  // whoever was waited for, and those who waited, are gone
  if (gather_until_) return;
  gather_count_ = static_cast<uint32_t>(std::min<size_t>(rules_.min_workers, members.size() + expired_.size()));
  for (const auto& [id, member] : members) {
    const TimeNs until = member.joined + rules_.membership.lease_ns;
    gather_until_ = std::min(gather_until_.value_or(until), until);
  }
}

void JointRounds::Leave(MemberId id, TimeNs now, RoundActions* actions) {
  const Member* member = membership_.Get(id);
  if (member == nullptr) return;
  const std::vector<Member> lost = {*member};
  membership_.Remove(id);
  history_.Drop(id);
  // Who comes next begins another run, as the first one began.
  if (membership_.members().empty()) {
    gather_until_ = kEver;
    gather_count_ = rules_.min_workers;
    deserted_ = false;
  }
  Lose(lost, now, actions);
}

void JointRounds::Tick(TimeNs now, RoundActions* actions) {
  // Who is lost is told before anything else, and rounds that memory was lacking to advance are advanced by a later
  // tick.
  const size_t before = actions->lost.size();
  for (const auto& [id, member] : membership_.members()) {
    if (member.lease_end <= now) actions->lost.push_back(member);
  }
  overdue_ = overdue_ || actions->lost.size() > before;
  membership_.Expire(now);
  if (actions->lost.size() > before) NoteExpired(actions->lost.size() - before, now);
  for (size_t i = before; i < actions->lost.size(); ++i) history_.Depart(actions->lost[i].id);
  const std::optional<TimeNs> due = NextClose();
  overdue_ = overdue_ || (due && *due <= now) || (gather_until_ && *gather_until_ <= now);
  if (!overdue_) return;
  Lose({}, now, actions);
  overdue_ = false;
}

void JointRounds::Excuse(TimeNs slept, TimeNs now) {
  membership_.Excuse(slept, now);
  const auto postpone = [slept, now](std::optional<TimeNs>& since) {
    if (since) since = std::min(*since + slept, now);  // what was noted since this process runs again is not earlier
  };
  postpone(waiting_since_);
  if (gather_until_ && gather_until_ != kEver)
    gather_until_ = std::min(*gather_until_ + slept, now + rules_.membership.lease_ns);
  awaited_since_ = std::min(awaited_since_ + slept, now);
  for (Round& round : rounds_) {
    for (BucketRound& bucket : round.buckets) postpone(bucket.quorum_at);
  }
}

std::optional<TimeNs> JointRounds::NextTick() const {
  std::optional<TimeNs> next;
  for (const std::optional<TimeNs>& due : {membership_.NextExpiry(), NextClose(), gather_until_}) {
    if (due && *due != kEver && (!next || *due < *next)) next = due;
  }
  return next;
}

void JointRounds::Lose(const std::vector<Member>& lost, TimeNs now, RoundActions* actions) {
  actions->lost.insert(actions->lost.end(), lost.begin(), lost.end());
  ElectInitializer(actions);
  Advance(now, actions);
}

void JointRounds::SetMayInitialize(MemberId id, bool may_initialize, RoundActions* actions) {
  membership_.SetMayInitialize(id, may_initialize);
  ElectInitializer(actions);
}

void JointRounds::ElectInitializer(RoundActions* actions) {
  if (initialization_.Elect(membership_)) actions->restart_initialization = true;
}

absl::Status JointRounds::CheckInitializer(MemberId id, uint32_t bucket) const {
  return initialization_.Check(membership_, id, bucket);
}

void JointRounds::Initialized(MemberId id, uint32_t bucket, TimeNs now, RoundActions* actions) {
  if (!CheckInitializer(id, bucket).ok()) return;
  initialization_.Uploaded(bucket);
  Advance(now, actions);
}

}  // namespace gradwire

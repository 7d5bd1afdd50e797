// What is merged, what closes, what opens; see joint_rounds.h.
#include "server/rounds/joint_rounds.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"

namespace gradwire {
namespace {

constexpr TimeNs kAtOnce = std::numeric_limits<TimeNs>::min();

}  // namespace

JointRounds::JointRounds(const Rules& rules)
    : rules_(rules),
      membership_(rules.membership),
      history_(rules.buckets, FramesKnown(rules.staleness), rules.membership.max_workers),
      lateness_(rules.deviations),
      initialization_(rules.buckets, rules.needs_initialization),
      gather_count_(rules.min_workers) {
  for (uint32_t i = 0; i <= rules_.staleness; ++i) rounds_.push_back(NewRound(0));
}

JointRounds::Round JointRounds::NewRound(TimeNs now) const {
  Round round;
  round.opened = now;
  round.buckets.resize(rules_.buckets);
  return round;
}

JointRounds::Round* JointRounds::Find(uint64_t round) {
  return round < round_ || round - round_ >= rounds_.size() ? nullptr : &rounds_[round - round_];
}

void JointRounds::Restore(const Recovered& recovered, TimeNs now) {
  round_ = recovered.round;
  recovered_versions_ = recovered.versions;
  initialization_.Finish();
  for (uint64_t i = 0; i < rounds_.size(); ++i) {
    rounds_[i].opened = now;
    for (uint32_t b = 0; b < rules_.buckets; ++b) {
      if (recovered.versions[b] <= round_ + i) continue;
      rounds_[i].buckets[b].closed = true;
      ++rounds_[i].closed;
    }
  }
  history_.Forget(recovered.known_from);
  if (recovered.nothing_known_before > 0) history_.ForgetAll(recovered.nothing_known_before);
  // Without workers of before, the round opens when min_workers have joined, as round 0 does.
  open_ = !recovered.workers.empty() || rounds_[0].closed > 0;
  if (open_) gather_until_.reset();
  for (const Recovered::Worker& worker : recovered.workers) {
    membership_.Join(worker.name, worker.incarnation, round_, now).IgnoreError();
    counted_on_[worker.name];
    history_.Return(MakeMemberId(worker.name, worker.incarnation));
  }
}

void JointRounds::RestoreContribution(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest) {
  history_.Restore(id, bucket, round, digest);
}

absl::Status JointRounds::CheckRound(MemberId id, uint32_t bucket, uint64_t round) const {
  if (bucket >= rules_.buckets) {
    return absl::InvalidArgumentError(
        absl::StrFormat("bucket %d does not exist: this job has %d", bucket, rules_.buckets));
  }
  if (membership_.Get(id) == nullptr) {
    return absl::NotFoundError("the worker is not a member of this job (it left, or its lease ended): join again");
  }
  if (round >= round_ + rounds_.size()) {
    return absl::FailedPreconditionError(
        absl::StrFormat("bucket %d: a frame of round %d, but round %d is open: pull version %d of every bucket first",
                        bucket, round, round_, round - rules_.staleness));
  }
  return absl::OkStatus();
}

absl::StatusOr<PushVerdict> JointRounds::Classify(MemberId id, uint32_t bucket, uint64_t round) const {
  GW_RETURN_IF_ERROR(CheckRound(id, bucket, round));
  if (rules_.recognize_repeats && history_.Find(id, bucket, round) != nullptr) return PushVerdict::kDuplicate;
  const Round* open = Find(round);
  const bool over = open == nullptr || open->buckets[bucket].closed;
  if (over && !history_.Knows(id, round)) {
    return absl::DataLossError(
        absl::StrFormat("bucket %d: it is no longer known whether a frame of round %d of this worker was merged (round "
                        "%d is open): join as a new worker",
                        bucket, round, round_));
  }
  return over || membership_.Get(id)->start_round > round ? PushVerdict::kNotIncluded : PushVerdict::kAccept;
}

absl::Status JointRounds::Repeat(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest) const {
  return history_.CheckSame(id, bucket, round, digest);
}

absl::StatusOr<PushVerdict> JointRounds::Complete(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest,
                                                  TimeNs now, RoundActions* actions) {
  GW_ASSIGN_OR_RETURN(const PushVerdict verdict, Classify(id, bucket, round));
  if (verdict == PushVerdict::kDuplicate) GW_RETURN_IF_ERROR(Repeat(id, bucket, round, digest));
  if (verdict != PushVerdict::kAccept) return verdict;
  BucketRound& open = Find(round)->buckets[bucket];
  const bool first = !open.contributions.contains(id);
  // Workers that left have frames in the round, too. What each may send is bounded by max_workers, so that sums are
  // right; one frame more waits in its worker's residual.
  const bool full = open.included >= rules_.membership.max_workers;
  open.contributions[id] = {!full, full ? 0 : digest, round};
  if (!full) {
    ++open.included;
    history_.Note(id, bucket, round, digest);
  }
  NoteCame(id, bucket, round, first, now);
  CloseIfDue(round, bucket, now, actions);
  if (rounds_[0].closed == rules_.buckets) Advance(now, actions);
  return full ? PushVerdict::kNotIncluded : verdict;
}

absl::StatusOr<PushVerdict> JointRounds::Abstain(MemberId id, uint32_t bucket, uint64_t round, TimeNs now,
                                                 RoundActions* actions) {
  GW_ASSIGN_OR_RETURN(const PushVerdict verdict, Classify(id, bucket, round));
  if (verdict != PushVerdict::kAccept) return verdict;
  Contributions& contributions = Find(round)->buckets[bucket].contributions;
  const bool first = !contributions.contains(id);
  contributions[id] = {false, 0, round};
  NoteCame(id, bucket, round, first, now);
  CloseIfDue(round, bucket, now, actions);
  if (rounds_[0].closed == rules_.buckets) Advance(now, actions);
  return verdict;
}

void JointRounds::NoteCame(MemberId id, uint32_t bucket, uint64_t round, bool first, TimeNs now) {
  membership_.NoteFrame(id, round);
  if (first) {
    uint32_t& came = Find(round)->came[id];
    if (++came == 1) Find(round)->heard.insert(membership_.Get(id)->worker);
    if (came == rules_.buckets) NoteAwaitedAlone(now);
  }
  BucketRound& open = Find(round)->buckets[bucket];
  if (rules_.quorum == 0 || open.contributions.size() < rules_.quorum) return;
  if (open.quorum_at) return lateness_.NoteLate(round, now - *open.quorum_at);
  open.quorum_at = now;
  lateness_.NoteQuorum(round, Find(round)->opened, now);
}

void JointRounds::NoteLate(MemberId id, uint64_t round, TimeNs now) {
  membership_.NoteFrame(id, round);
  if (rules_.quorum > 0) lateness_.NoteAfterClose(round, now);
}

std::optional<TimeNs> JointRounds::CloseTime(uint64_t round, uint32_t bucket, bool* missing) const {
  const BucketRound& open = Find(round)->buckets[bucket];
  if (!open_ || open.closed || (round > round_ && !Find(round - 1)->buckets[bucket].closed)) return std::nullopt;
  bool anyone = false;
  bool later = false;
  bool awaited = false;
  *missing = false;
  for (const auto& [id, member] : membership_.members()) {
    anyone = anyone || member.start_round <= round;
    later = later || (member.start_round > round && member.start_round != Membership::kNever);
    if (member.start_round > round || open.contributions.contains(id)) continue;
    *missing = true;
    if (rules_.quorum == 0) return std::nullopt;  // it waits for all, whoever they are
    // Who has not been heard of since an earlier round cannot have this one: it is not waited for.
    awaited = awaited || member.start_round == round || member.heard_round + 1 >= round;
  }
  if (!*missing) {
    // Nobody is left in this round. It stays open for the next joiner to enter, unless somebody waits for a later one.
    return anyone || (later && round == round_) ? std::optional<TimeNs>(kAtOnce) : std::nullopt;
  }
  if (!open.quorum_at) {
    // Those who could make it one rest, and enough wait for the next one.
    const std::optional<TimeNs> rest = round == round_ && waiting_since_ ? lateness_.Rest() : std::nullopt;
    return rest ? std::optional<TimeNs>(*waiting_since_ + *rest) : std::nullopt;
  }
  if (!awaited) return kAtOnce;
  const std::optional<TimeNs> deadline = lateness_.Deadline();
  return deadline ? std::optional<TimeNs>(*open.quorum_at + *deadline) : std::nullopt;
}

std::optional<TimeNs> JointRounds::NextClose() const {
  std::optional<TimeNs> next;
  if (rules_.quorum == 0) return next;
  for (uint32_t b = 0; b < rules_.buckets; ++b) {
    if ((!rounds_[0].buckets[b].quorum_at && !waiting_since_) || rounds_[0].buckets[b].closed) continue;
    bool missing = false;
    const std::optional<TimeNs> time = CloseTime(round_, b, &missing);
    if (time && (!next || *time < *next)) next = time;
  }
  return next;
}

void JointRounds::CloseIfDue(uint64_t round, uint32_t bucket, TimeNs now, RoundActions* actions) {
  // The bucket of the round behind it may have been complete before.
  for (; Find(round) != nullptr; ++round) {
    bool missing = false;
    const std::optional<TimeNs> time = CloseTime(round, bucket, &missing);
    if (!time || *time > now) return;
    Round& open = *Find(round);
    BucketRound& closing = open.buckets[bucket];
    actions->close.emplace_back();  // what is closed is told, or nothing is
    closing.closed = true;
    open.is_short = open.is_short || missing;
    ++open.closed;
    actions->close.back() = {bucket, round, closing.included, std::move(closing.contributions)};
    closing.contributions.clear();
  }
}

void JointRounds::Regather(TimeNs now) {
  if (gather_until_ && *gather_until_ <= now) gather_until_.reset();
  if (!gather_until_ || Gathered()) return;
  // As long as it takes, a run that has begun goes on; for a lease, frames may wait.
  if (gather_until_ == kEver ? !RoundHasContributions() : rounds_[0].closed == 0) open_ = false;
}

void JointRounds::NoteWaiting(TimeNs now) {
  const auto waits = [this](const auto& m) {
    return m.second.start_round > round_ && m.second.start_round != Membership::kNever;
  };
  const auto& members = membership_.members();
  const bool enough = rules_.quorum > 0 && std::count_if(members.begin(), members.end(), waits) >= rules_.quorum;
  if (!enough) waiting_since_.reset();
  if (enough && !waiting_since_) waiting_since_ = now;
}

void JointRounds::Advance(TimeNs now, RoundActions* actions) {
  ElectInitializer(actions);
  Regather(now);
  if (!open_) {
    if (!initialized() || rules_.buckets == 0 || (gather_until_ && !Gathered())) return;
    open_ = true;
    waiting_since_.reset();
    for (Round& round : rounds_) {
      round.opened = now;
      for (BucketRound& bucket : round.buckets) {
        if (bucket.quorum_at) bucket.quorum_at = now;
      }
    }
    actions->opened = round_;
  }
  for (;;) {
    NoteWaiting(now);
    for (uint64_t round = round_; Find(round) != nullptr; ++round) {
      for (uint32_t b = 0; b < rules_.buckets; ++b) CloseIfDue(round, b, now, actions);
    }
    if (rounds_[0].closed < rules_.buckets) break;
    while (rounds_[0].closed == rules_.buckets) OpenNext(now, actions);
    Regather(now);
  }
  NoteAwaitedAlone(now);
}

void JointRounds::OpenNext(TimeNs now, RoundActions* actions) {
  std::map<std::string, CountedOn, std::less<>> counted_on;
  for (const auto& [id, member] : membership_.members()) {
    if (member.start_round <= round_ + 1) counted_on[member.worker];
  }
  Round next = NewRound(now);
  short_rounds_ += rounds_[0].is_short ? 1 : 0;
  std::rotate(rounds_.begin(), rounds_.begin() + 1, rounds_.end());
  rounds_.back() = std::move(next);
  counted_on_ = std::move(counted_on);
  ++round_;
  waiting_since_.reset();
  if (gather_until_ == kEver || Gathered()) gather_until_.reset();
  actions->opened = round_;
}

uint64_t JointRounds::NextVersionOf(uint32_t bucket) const {
  uint64_t next = round_;
  for (const Round& round : rounds_) {
    if (!round.buckets[bucket].closed) break;
    ++next;
  }
  return next;
}

std::optional<uint64_t> JointRounds::NextBoundary() const {
  uint64_t next = round_;
  for (const Round& round : rounds_) {
    if (round.closed == 0) break;
    ++next;
  }
  return next;
}

Rounds::Status JointRounds::status() const {
  return {.members = MembersOfRound(),
          .has_contributions = RoundHasContributions(),
          .deadline = rules_.quorum == 0 ? std::nullopt : lateness_.Deadline(),
          .short_rounds = short_rounds_,
          .histories = history_.incarnations()};
}

uint32_t JointRounds::MembersOfRound() const {
  const auto& members = membership_.members();
  return static_cast<uint32_t>(
      std::count_if(members.begin(), members.end(), [this](const auto& m) { return InRound(m.second); }));
}

bool JointRounds::Awaits(const Member& member) const {
  return open_ && InRound(member) &&
         std::any_of(rounds_[0].buckets.begin(), rounds_[0].buckets.end(),
                     [&](const BucketRound& b) { return !b.closed && !b.contributions.contains(member.id); });
}

bool JointRounds::AllCame(MemberId id, const Round& round) const {
  const auto came = round.came.find(id);
  return came != round.came.end() && came->second == rules_.buckets;
}

MemberId JointRounds::AwaitedAlone() const {
  if (!open_) return 0;
  MemberId alone = 0;
  bool others = false;
  for (const auto& [id, member] : membership_.members()) {
    if (!InRound(member)) continue;
    // Frames of later rounds come behind those of earlier ones: who has sent all of the last one has sent all.
    if (AllCame(id, rounds_.back())) {
      others = true;
    } else if (alone != 0 || AllCame(id, rounds_[0])) {
      return 0;
    } else {
      alone = id;
    }
  }
  return others ? alone : 0;
}

void JointRounds::NoteAwaitedAlone(TimeNs now) {
  const MemberId alone = AwaitedAlone();
  if (alone == awaited_alone_) return;
  if (awaited_alone_ != 0) membership_.NoteHeldUp(awaited_alone_, now - awaited_since_);
  awaited_alone_ = alone;
  awaited_since_ = now;
}

TimeNs JointRounds::HeldUp(const Member& member, TimeNs now) const {
  return member.held_up + (member.id == awaited_alone_ ? std::max<TimeNs>(0, now - awaited_since_) : 0);
}

bool JointRounds::RoundHasContributions() const {
  return std::any_of(rounds_.begin(), rounds_.end(), [](const Round& round) {
    return std::any_of(round.buckets.begin(), round.buckets.end(),
                       [](const BucketRound& b) { return b.closed || !b.contributions.empty(); });
  });
}

}  // namespace gradwire

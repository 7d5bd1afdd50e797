// The rounds of one job on one shard, as a pure state machine: (state, event, now) -> (state, actions).
// It decides who is waited for and how long, which buckets close and when the next round opens; its owner (JobShard)
// moves the bytes. No I/O, no clock, no threads, no locks: the owner serialises calls, and a simulator can drive it.
// What the rules are and why: proto/ROUNDS.md.
//
//   Join, Resume, CatchUp, Leave, Renew, Tick  -> members lost, buckets closed, rounds opened
//   Initialized, Classify, Complete, Abstain   -> verdicts, buckets closed, rounds opened
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/rounds/initialization.h"
#include "server/rounds/lateness.h"
#include "server/rounds/membership.h"
#include "server/rounds/push_history.h"
#include "server/rounds/rounds.h"

namespace gradwire {

class JointRounds final : public Rounds {
 public:
  struct Rules {
    uint32_t buckets = 0;
    uint32_t min_workers = 1;
    bool needs_initialization = true;  // false for OPTIMIZER_NONE
    uint32_t quorum = 0;               // contributions with which a bucket may close over the others; 0: all
    double deviations = 0;             // see Lateness
    uint32_t staleness = 0;            // rounds that are open beside the oldest one
    uint32_t rounds_per_step = 1;      // a worker that goes on with any of its last step is in time
    bool recognize_repeats = true;     // false: a frame that comes twice is merged twice, which simulators must notice
    Membership::Rules membership;
  };
  // How far ahead of the open round a worker may ask to start.
  static constexpr uint64_t kMaxRoundsAhead = 64;

  // Frames of a bucket that are known of each worker: it has at most 1 + staleness unanswered, and begins the next one
  // meanwhile.
  static constexpr uint32_t FramesKnown(uint32_t staleness) { return staleness + 2; }

  explicit JointRounds(const Rules& rules);

  // Membership is effective at a round boundary: a worker that joins while round r is open contributes from the next
  // one on of which no bucket has closed. It starts at r itself where no bucket of it has closed, nothing has come of a
  // worker of this name, and r has not opened yet, has no members, or counted on this name when it opened.
  absl::StatusOr<JoinOutcome> Join(std::string_view worker, uint64_t incarnation, uint64_t not_before,
                                   bool may_initialize, TimeNs now, RoundActions* actions) override;
  // The worker is in the open round at once, or in the later one that CatchUp has told it since. Where `point.round` is
  // over for good, start_version is another one: the worker is a member again, but nobody waits for it until CatchUp.
  // Without parameters there is nothing to catch up to: then it is in the next round that it can be in.
  absl::StatusOr<JoinOutcome> Resume(std::string_view worker, uint64_t incarnation, const ResumePoint& point,
                                     TimeNs now, RoundActions* actions) override;
  absl::StatusOr<JoinOutcome> CatchUp(std::string_view worker, uint64_t incarnation, uint64_t not_before, TimeNs now,
                                      RoundActions* actions) override;
  absl::Status CheckNothingLost(std::string_view worker, const ResumePoint& point) const override;
  void Restore(const Recovered& recovered, TimeNs now) override;
  void RestoreContribution(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest) override;
  void Leave(MemberId id, TimeNs now, RoundActions* actions) override;
  void Tick(TimeNs now, RoundActions* actions) override;
  std::optional<TimeNs> NextTick() const override;
  void Renew(MemberId id, TimeNs now) override { membership_.Renew(id, now); }
  // Deadlines of quorums stand still for that time, too.
  void Excuse(TimeNs slept, TimeNs now) override;
  void SetMayInitialize(MemberId id, bool may_initialize, RoundActions* actions) override;

  absl::Status CheckInitializer(MemberId id, uint32_t bucket) const override;
  void Initialized(MemberId id, uint32_t bucket, TimeNs now, RoundActions* actions) override;

  absl::StatusOr<PushVerdict> Classify(MemberId id, uint32_t bucket, uint64_t round) const override;
  absl::Status Repeat(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest) const override;
  absl::StatusOr<PushVerdict> Complete(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest, TimeNs now,
                                       RoundActions* actions) override;
  // A good frame that comes before the bucket closes replaces this.
  absl::StatusOr<PushVerdict> Abstain(MemberId id, uint32_t bucket, uint64_t round, TimeNs now,
                                      RoundActions* actions) override;
  void NoteLate(MemberId id, uint64_t round, TimeNs now) override;
  bool MayAskFor(uint32_t bucket, uint64_t round) const override { return history_.MayMissUpdate(bucket, round); }
  std::vector<PushHistory::Merged> MergedOf(uint32_t bucket) const override { return history_.Of(bucket); }

  std::optional<uint64_t> NextBoundary() const override;
  std::optional<uint64_t> MostApart() const override { return 1 + rules_.staleness; }
  uint64_t NextVersionOf(uint32_t bucket) const override;
  uint64_t round() const override { return round_; }
  bool open() const override { return open_; }
  bool initialized() const override { return initialization_.done(); }
  bool MustInitialize(MemberId id) const override { return initialization_.Chosen(id); }
  bool InRound(const Member& member) const override { return member.start_round <= round_; }
  bool Awaits(const Member& member) const override;
  TimeNs HeldUp(const Member& member, TimeNs now) const override;
  const Membership& membership() const override { return membership_; }
  Status status() const override;

 private:
  struct BucketRound {
    bool closed = false;
    uint32_t included = 0;
    std::optional<TimeNs> quorum_at;
    Contributions contributions;
  };
  struct Round {
    TimeNs opened = 0;
    uint32_t closed = 0;                       // buckets
    bool is_short = false;                     // a bucket closed without a member
    std::map<MemberId, uint32_t> came;         // buckets of which something came of each
    std::set<std::string, std::less<>> heard;  // the workers of these
    std::vector<BucketRound> buckets;
  };

  Round NewRound(TimeNs now) const;
  Round* Find(uint64_t round);  // null: not open
  const Round* Find(uint64_t round) const { return const_cast<JointRounds*>(this)->Find(round); }
  uint32_t MembersOfRound() const;
  bool RoundHasContributions() const;
  absl::Status CheckRound(MemberId id, uint32_t bucket, uint64_t round) const;
  // anew: as an incarnation that is no member.
  uint64_t StartRoundOfNewcomer(std::string_view worker, bool anew) const;
  // It is in the oldest open round.
  void NoteReturn(std::string_view worker);
  // Where nobody is left who was in an earlier round, the others of the run are waited for.
  void NoteExpired(size_t lost, TimeNs now);
  JoinOutcome OutcomeOf(MemberId id) const;
  void Lose(const std::vector<Member>& lost, TimeNs now, RoundActions* actions);
  void ElectInitializer(RoundActions* actions);
  void NoteCame(MemberId id, uint32_t bucket, uint64_t round, bool first, TimeNs now);
  bool AllCame(MemberId id, const Round& round) const;
  // The only member that the oldest round lacks a frame of, where nothing is open for any other; 0: there is none.
  MemberId AwaitedAlone() const;
  // Behind everything that may change who that is.
  void NoteAwaitedAlone(TimeNs now);
  // From when on a bucket may close; nothing: not known yet. *missing: it would close without a member.
  std::optional<TimeNs> CloseTime(uint64_t round, uint32_t bucket, bool* missing) const;
  std::optional<TimeNs> NextClose() const;
  void CloseIfDue(uint64_t round, uint32_t bucket, TimeNs now, RoundActions* actions);
  bool Gathered() const { return membership_.members().size() >= gather_count_; }
  // Shuts the open round's gate where it has to wait for workers.
  void Regather(TimeNs now);
  // Since when as many members as make a quorum wait for the round behind the open one.
  void NoteWaiting(TimeNs now);
  // Opens round 0, closes what can be closed, opens later rounds, until nothing changes.
  void Advance(TimeNs now, RoundActions* actions);
  void OpenNext(TimeNs now, RoundActions* actions);

  const Rules rules_;
  Membership membership_;
  PushHistory history_;
  Lateness lateness_;
  Initialization initialization_;
  uint64_t round_ = 0;
  std::vector<uint64_t> recovered_versions_;  // per bucket, when the journal had been replayed
  bool open_ = false;
  static constexpr TimeNs kEver = std::numeric_limits<TimeNs>::max();
  // Until then the open round waits for so many members: the first one of a run as long as it takes; where the leases
  // of all have ended, those behind it for a lease from the moment at which the first of them was back.
  std::optional<TimeNs> gather_until_ = kEver;
  uint32_t gather_count_;
  bool deserted_ = false;        // leases of all have ended, and nobody is back
  std::vector<TimeNs> expired_;  // when leases ended, of late
  struct CountedOn {
    // While others waited in this round: once, for one that is started again and again would keep them there.
    bool came_back = false;
  };
  // The workers that were in the oldest open round when it opened, or are in it since, by name.
  std::map<std::string, CountedOn, std::less<>> counted_on_;
  std::vector<Round> rounds_;  // from round_ on: 1 + staleness
  std::optional<TimeNs> waiting_since_;
  bool overdue_ = false;  // a tick found something to do, and has not done it
  MemberId awaited_alone_ = 0;
  TimeNs awaited_since_ = 0;
  uint64_t short_rounds_ = 0;
};

}  // namespace gradwire

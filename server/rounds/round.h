// The rounds of one job on one shard, as a pure state machine: (state, event, now) -> (state, actions).
// It decides who is waited for and how long, which buckets close and when the next round opens; its owner (JobShard)
// moves the bytes. No I/O, no clock, no threads, no locks: the owner serialises calls, and a simulator can drive it.
// What the rules are and why: proto/ROUNDS.md.
//
//   Join, Resume, CatchUp, Leave, Renew, Tick  -> members lost, buckets closed, rounds opened
//   Initialized, Classify, Complete, Abstain   -> verdicts, buckets closed, rounds opened
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/rounds/lateness.h"
#include "server/rounds/membership.h"
#include "server/rounds/push_history.h"

namespace gradwire {

// A member's part in a bucket of a round.
struct Contribution {
  bool included = false;  // false: abstained
  uint32_t digest = 0;
};
using Contributions = std::map<MemberId, Contribution>;

// What the owner has to do after an event, in this order. Appended to, never cleared, by the machine.
struct RoundActions {
  struct Close {
    uint32_t bucket = 0;
    uint64_t round = 0;
    uint32_t contributors = 0;
    Contributions contributions;
  };
  std::vector<Member> lost;             // abandon their partial frames and end their streams
  bool restart_initialization = false;  // the initializer was lost: drop what it had uploaded
  std::vector<Close> close;             // finish these accumulators, in order
  std::optional<uint64_t> opened;       // the last round that opened

  bool empty() const { return lost.empty() && !restart_initialization && close.empty() && !opened; }
};

enum class PushVerdict {
  kAccept,       // merge it
  kNotIncluded,  // too late: the worker returns it to its residual
  kDuplicate,    // merged before
};

class RoundMachine {
 public:
  struct Rules {
    uint32_t buckets = 0;
    uint32_t min_workers = 1;
    bool needs_initialization = true;  // false for OPTIMIZER_NONE
    uint32_t quorum = 0;               // contributions with which a bucket may close over the others; 0: all
    double deviations = 0;             // see Lateness
    uint32_t staleness = 0;            // rounds that are open beside the oldest one
    bool recognize_repeats = true;     // false: a frame that comes twice is merged twice, which simulators must notice
    Membership::Rules membership;
  };
  struct JoinOutcome {
    MemberId id = 0;
    uint64_t start_version = 0;
    bool must_initialize = false;
    bool waiting_for_workers = false;
  };
  // Where a worker that comes back stands.
  struct ResumePoint {
    uint64_t round = 0;
    // It comes from a server before this one, whose versions are this one's up to where it was recovered.
    bool from_before = false;
    std::vector<uint32_t> seen = {};  // buckets of which it has seen the version that `round` makes
  };
  // Where the journal of a shard ends.
  struct Recovered {
    struct Worker {
      std::string name;
      uint64_t incarnation = 0;
    };
    uint64_t round = 0;              // the oldest that is not closed
    std::vector<uint64_t> versions;  // per bucket, at least `round`: the rounds before it are closed
    std::vector<Worker> workers;     // of the last closed bucket: the open round waits for them
    uint64_t known_from = 0;         // contributions to earlier rounds are not all known
  };
  // How far ahead of the open round a worker may ask to start.
  static constexpr uint64_t kMaxRoundsAhead = 64;

  explicit RoundMachine(const Rules& rules);

  // Membership is effective at a round boundary: a worker that joins while round r is open contributes from the next
  // one on of which no bucket has closed. It starts at r itself when r has not opened yet, or when r has no members
  // and no bucket of it has closed. `not_before`: a worker of several shards asks every one for the latest start it was
  // given. `may_initialize`: see SetMayInitialize.
  // Errors: those of Membership::Join; InvalidArgument when `not_before` is too far ahead.
  absl::StatusOr<JoinOutcome> Join(std::string_view worker, uint64_t incarnation, uint64_t not_before,
                                   bool may_initialize, TimeNs now, RoundActions* actions);
  // A worker that was a member goes on with `round` after its connection broke, its lease ended or this server
  // restarted: it is in the open round at once, and what it sent before is known by its digests. Where `round` is over
  // for good, start_version is another one: the worker is a member again, but nobody waits for it until CatchUp.
  // Errors: DataLoss (it has seen a later version than there is here), FailedPrecondition (another incarnation took its
  // place, or there are no parameters yet), those of Join.
  absl::StatusOr<JoinOutcome> Resume(std::string_view worker, uint64_t incarnation, const ResumePoint& point,
                                     TimeNs now, RoundActions* actions);
  // A worker that fell behind starts anew, as a newcomer does, not before `not_before`. What it contributed stays.
  // Errors: FailedPrecondition as Resume, those of Join.
  absl::StatusOr<JoinOutcome> CatchUp(std::string_view worker, uint64_t incarnation, uint64_t not_before, TimeNs now,
                                      RoundActions* actions);
  // Takes a fresh machine, with parameters, to where a journal ends. Workers get a fresh lease.
  void Restore(const Recovered& recovered, TimeNs now);
  // Before Restore: a frame that is in a record of the journal.
  void RestoreContribution(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest);
  void Leave(MemberId id, TimeNs now, RoundActions* actions);
  // Ends the leases that have run out, and closes buckets that waited long enough for those who are late.
  void Tick(TimeNs now, RoundActions* actions);
  // When Tick has something to do; may be in the past.
  std::optional<TimeNs> NextTick() const;
  void Renew(MemberId id, TimeNs now) { membership_.Renew(id, now); }
  // What the latest join or heartbeat of `id` said. Only members that may are chosen to send the initial parameters;
  // one that no longer may is replaced.
  void SetMayInitialize(MemberId id, bool may_initialize, RoundActions* actions);

  // May `id` upload initial parameters of `bucket`? Ok: yes. AlreadyExists: they are complete. FailedPrecondition:
  // another worker was chosen (named).
  absl::Status CheckInitializer(MemberId id, uint32_t bucket) const;
  // `bucket` was uploaded completely by `id`, for which CheckInitializer was ok.
  void Initialized(MemberId id, uint32_t bucket, TimeNs now, RoundActions* actions);

  // May the first bytes of a frame be merged? A contribution that was seen before is judged by Repeat, once its digest
  // is known. Errors: FailedPrecondition (the round is not open yet; names both rounds), NotFound (not a member),
  // DataLoss (the round is so long over that it is not known whether the frame is in it).
  absl::StatusOr<PushVerdict> Classify(MemberId id, uint32_t bucket, uint64_t round) const;
  // A repeated frame: ok when it is the same, FailedPrecondition when its bytes differ.
  absl::Status Repeat(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest) const;
  // A whole frame is in the accumulator. kAccept: it counts. Otherwise the owner takes it out again.
  absl::StatusOr<PushVerdict> Complete(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest, TimeNs now,
                                       RoundActions* actions);
  // The worker contributes nothing to (bucket, round): by its own word, or because its frame was refused. A good frame
  // that comes before the bucket closes replaces this.
  absl::StatusOr<PushVerdict> Abstain(MemberId id, uint32_t bucket, uint64_t round, TimeNs now, RoundActions* actions);
  // A frame was not included: how late it came is learned from.
  void NoteLate(MemberId id, uint64_t round, TimeNs now);
  // A worker whose last frame in `bucket` is of `round` may still ask for the update.
  bool MayAskFor(uint32_t bucket, uint64_t round) const { return history_.IsLastOfAny(bucket, round); }

  // The next version that every bucket passes.
  uint64_t NextBoundary() const;
  // The version that `bucket` has once what has closed of it is applied.
  uint64_t NextVersionOf(uint32_t bucket) const;
  uint64_t round() const { return round_; }  // the oldest open one, or the one that will open next
  bool open() const { return open_; }
  bool initialized() const { return initialized_; }
  bool MustInitialize(MemberId id) const { return !initialized_ && initializer_ == id; }
  bool InRound(const Member& member) const { return member.start_round <= round_; }
  uint32_t MembersOfRound() const;
  bool RoundHasContributions() const;
  uint64_t short_rounds() const { return short_rounds_; }  // that closed without a member, since the start
  std::optional<TimeNs> deadline() const { return rules_.quorum == 0 ? std::nullopt : lateness_.Deadline(); }
  const Membership& membership() const { return membership_; }

 private:
  struct BucketRound {
    bool closed = false;
    uint32_t included = 0;
    std::optional<TimeNs> quorum_at;
    Contributions contributions;
  };
  struct Round {
    TimeNs opened = 0;
    uint32_t closed = 0;    // buckets
    bool is_short = false;  // a bucket closed without a member
    std::vector<BucketRound> buckets;
  };

  Round NewRound(TimeNs now) const;
  Round* Find(uint64_t round);  // null: not open
  const Round* Find(uint64_t round) const { return const_cast<RoundMachine*>(this)->Find(round); }
  absl::Status CheckRound(MemberId id, uint32_t bucket, uint64_t round) const;
  absl::Status CheckNothingLost(std::string_view worker, const ResumePoint& point) const;
  absl::Status CheckNotSuperseded(std::string_view worker, uint64_t incarnation) const;
  uint64_t StartRoundOfNewcomer(MemberId id) const;
  JoinOutcome OutcomeOf(MemberId id) const;
  void Lose(const std::vector<Member>& lost, TimeNs now, RoundActions* actions);
  void ElectInitializer(RoundActions* actions);
  void NoteCame(MemberId id, uint32_t bucket, uint64_t round, TimeNs now);
  // From when on a bucket may close; nothing: not known yet. *missing: it would close without a member.
  std::optional<TimeNs> CloseTime(uint64_t round, uint32_t bucket, bool* missing) const;
  std::optional<TimeNs> NextClose() const;
  void CloseIfDue(uint64_t round, uint32_t bucket, TimeNs now, RoundActions* actions);
  // Opens round 0, closes what can be closed, opens later rounds, until nothing changes.
  void Advance(TimeNs now, RoundActions* actions);
  void OpenNext(TimeNs now, RoundActions* actions);

  const Rules rules_;
  Membership membership_;
  PushHistory history_;
  Lateness lateness_;
  uint64_t round_ = 0;
  // When the journal had been replayed: the open round, and the buckets of it that were closed.
  uint64_t recovered_round_ = 0;
  std::vector<bool> recovered_closed_;
  bool open_ = false;
  bool initialized_ = false;
  std::optional<MemberId> initializer_;
  std::vector<bool> uploaded_;  // buckets whose initial parameters are here
  uint32_t uploaded_count_ = 0;
  std::deque<Round> rounds_;  // from round_ on: 1 + staleness
  uint64_t short_rounds_ = 0;
};

}  // namespace gradwire

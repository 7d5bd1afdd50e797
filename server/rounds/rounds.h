// What the owner of a job's rounds on one shard (JobShard) asks of them and has to carry out, whatever the job's mode:
// JointRounds for rounds that are closed over several workers, AsyncRounds where every frame makes a version.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/clock.h"
#include "server/rounds/membership.h"
#include "server/rounds/push_history.h"

namespace gradwire {

// A member's part in a bucket of a round.
struct Contribution {
  bool included = false;  // false: abstained
  uint32_t digest = 0;
  uint64_t round = 0;  // that its frame says
};
using Contributions = std::map<MemberId, Contribution>;

// What the owner has to do after an event, in this order. Appended to, never cleared, by the rounds.
struct RoundActions {
  struct Close {
    uint32_t bucket = 0;
    uint64_t round = 0;  // makes version round + 1
    uint32_t contributors = 0;
    Contributions contributions;
  };
  std::vector<Member> lost;             // abandon their partial frames and end their streams
  bool restart_initialization = false;  // the initializer was lost: drop what it had uploaded
  std::vector<Close> close;             // finish these accumulators, in order
  std::optional<uint64_t> opened;       // the last round that opened

  // The round of the last of `close`.
  std::optional<uint64_t> last_closed() const {
    return close.empty() ? std::nullopt : std::optional(close.back().round);
  }
  bool empty() const { return lost.empty() && !restart_initialization && close.empty() && !opened; }
};

enum class PushVerdict {
  kAccept,       // merge it
  kNotIncluded,  // too late: the worker returns it to its residual
  kDuplicate,    // merged before
};

// A pure state machine: (state, event, now) -> (state, actions). No I/O, no clock, no threads, no locks: the owner
// serialises calls, and a simulator can drive it.
class Rounds {
 public:
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
    std::vector<uint32_t> seen = {};      // of each bucket as many times as versions behind `round` that it has seen
    std::vector<uint64_t> versions = {};  // asynchronous rounds: per bucket, the newest version that it has seen
  };
  // Where the journal of a shard ends.
  struct Recovered {
    struct Worker {
      std::string name;
      uint64_t incarnation = 0;
    };
    uint64_t round = 0;                 // the oldest that is not closed
    std::vector<uint64_t> versions;     // per bucket, at least `round`: the rounds before it are closed
    std::vector<Worker> workers;        // of the last closed bucket: the open round waits for them
    uint64_t known_from = 0;            // contributions to earlier rounds are not all known
    uint64_t nothing_known_before = 0;  // the same, of anybody: records are missing
  };

  // Of the open round, or the one that will open next, for who looks on.
  struct Status {
    uint32_t members = 0;
    bool has_contributions = false;  // some members have contributed, others not
    std::optional<TimeNs> deadline;  // for those who are late
    uint64_t short_rounds = 0;       // that closed without a member, since the start
    size_t histories = 0;            // incarnations of which is known what was merged; bounded: see PushHistory
  };

  virtual ~Rounds() = default;

  // A newcomer; JoinOutcome says where it starts. `not_before`: a worker of several shards asks every one for the
  // latest start it was given. `may_initialize`: see SetMayInitialize.
  // Errors: those of Membership::Join; InvalidArgument when `not_before` is too far ahead.
  virtual absl::StatusOr<JoinOutcome> Join(std::string_view worker, uint64_t incarnation, uint64_t not_before,
                                           bool may_initialize, TimeNs now, RoundActions* actions) = 0;
  // A worker that was a member goes on after its connection broke, its lease ended or this server restarted: what it
  // sent before is known by its digests. A start_version other than point.round: it has to catch up.
  // Errors: DataLoss (it has seen a later version than there is here), FailedPrecondition (another incarnation took its
  // place, or there are no parameters yet), those of Join.
  virtual absl::StatusOr<JoinOutcome> Resume(std::string_view worker, uint64_t incarnation, const ResumePoint& point,
                                             TimeNs now, RoundActions* actions) = 0;
  // DataLoss: the worker has seen a later version than there is here.
  virtual absl::Status CheckNothingLost(std::string_view worker, const ResumePoint& point) const = 0;
  // A worker that fell behind starts anew, as a newcomer does, not before `not_before`. What it contributed stays.
  // Errors: FailedPrecondition as Resume, those of Join.
  virtual absl::StatusOr<JoinOutcome> CatchUp(std::string_view worker, uint64_t incarnation, uint64_t not_before,
                                              TimeNs now, RoundActions* actions) = 0;
  // Takes fresh rounds, with parameters, to where a journal ends. Workers get a fresh lease.
  virtual void Restore(const Recovered& recovered, TimeNs now) = 0;
  // Before Restore: a frame that is in a record of the journal.
  virtual void RestoreContribution(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest) = 0;
  virtual void Leave(MemberId id, TimeNs now, RoundActions* actions) = 0;
  // Ends the leases that have run out, and closes what has waited long enough for those who are late.
  virtual void Tick(TimeNs now, RoundActions* actions) = 0;
  // When Tick has something to do; may be in the past.
  virtual std::optional<TimeNs> NextTick() const = 0;
  virtual void Renew(MemberId id, TimeNs now) = 0;
  // This process did not run for so long, and heard no sign of life: see Membership::Excuse.
  virtual void Excuse(TimeNs slept, TimeNs now) = 0;
  // What the latest join or heartbeat of `id` said. Only members that may are chosen to send the initial parameters;
  // one that no longer may is replaced.
  virtual void SetMayInitialize(MemberId id, bool may_initialize, RoundActions* actions) = 0;

  // May `id` upload initial parameters of `bucket`? Ok: yes. AlreadyExists: they are complete. FailedPrecondition:
  // another worker was chosen (named).
  virtual absl::Status CheckInitializer(MemberId id, uint32_t bucket) const = 0;
  // `bucket` was uploaded completely by `id`, for which CheckInitializer was ok.
  virtual void Initialized(MemberId id, uint32_t bucket, TimeNs now, RoundActions* actions) = 0;

  // May the first bytes of a frame be merged? A contribution that was seen before is judged by Repeat, once its digest
  // is known. Errors: FailedPrecondition (the round is not there yet; names both), NotFound (not a member), DataLoss
  // (it is so long ago that it is not known whether the frame was merged).
  virtual absl::StatusOr<PushVerdict> Classify(MemberId id, uint32_t bucket, uint64_t round) const = 0;
  // A repeated frame: ok when it is the same, FailedPrecondition when its bytes differ.
  virtual absl::Status Repeat(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest) const = 0;
  // A whole frame is in the accumulator. kAccept: it counts. Otherwise the owner takes it out again.
  virtual absl::StatusOr<PushVerdict> Complete(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest,
                                               TimeNs now, RoundActions* actions) = 0;
  // The worker contributes nothing to (bucket, round): by its own word, or because its frame was refused.
  virtual absl::StatusOr<PushVerdict> Abstain(MemberId id, uint32_t bucket, uint64_t round, TimeNs now,
                                              RoundActions* actions) = 0;
  // A frame was not included: how late it came may be learned from.
  virtual void NoteLate(MemberId id, uint64_t round, TimeNs now) = 0;
  // A worker of whose last frames in `bucket` one is of `round` may still ask for the update.
  virtual bool MayAskFor(uint32_t bucket, uint64_t round) const = 0;
  // What workers may send again of a bucket, the oldest first.
  virtual std::vector<PushHistory::Merged> MergedOf(uint32_t bucket) const = 0;

  // The next version that every bucket passes. Nothing: each has versions of its own.
  virtual std::optional<uint64_t> NextBoundary() const = 0;
  // How many versions the shards of the job, and the buckets of one, may be apart while nothing is lost. Nothing: any.
  virtual std::optional<uint64_t> MostApart() const = 0;
  // The version that `bucket` has once what has closed of it is applied.
  virtual uint64_t NextVersionOf(uint32_t bucket) const = 0;
  virtual uint64_t round() const = 0;  // the oldest open one, or the one that will open next
  virtual bool open() const = 0;
  virtual bool initialized() const = 0;
  virtual bool MustInitialize(MemberId id) const = 0;
  virtual bool InRound(const Member& member) const = 0;
  // The open round lacks a frame of this member.
  virtual bool Awaits(const Member& member) const = 0;
  // For how long this member alone was awaited, while everybody else had nothing left to send; in all, until now.
  virtual TimeNs HeldUp(const Member& member, TimeNs now) const = 0;
  virtual const Membership& membership() const = 0;
  virtual Status status() const = 0;
};

}  // namespace gradwire

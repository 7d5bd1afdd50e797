// Synchronous rounds of one job on one shard, as a pure state machine: (state, event, now) -> (state, actions).
// It decides who is waited for, which buckets close and when the next round opens; its owner (JobShard) moves the
// bytes. No I/O, no clock, no threads, no locks: the owner serialises calls, and a simulator can drive it.
//
//   Join, Leave, Renew, Tick                  -> members lost, buckets closed, rounds opened
//   Initialized, Classify, Complete, Abstain  -> verdicts, buckets closed, rounds opened
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/rounds/membership.h"

namespace gradwire {

// What the owner has to do after an event, in this order. Appended to, never cleared, by the machine.
struct RoundActions {
  struct Close {
    uint32_t bucket = 0;
    uint64_t round = 0;
    uint32_t contributors = 0;
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
    Membership::Rules membership;
  };
  struct JoinOutcome {
    MemberId id = 0;
    uint64_t start_version = 0;
    bool must_initialize = false;
    bool waiting_for_workers = false;
  };
  // A member's part in a bucket of a round.
  struct Contribution {
    bool included = false;  // false: abstained
    uint32_t digest = 0;
  };
  using Contributions = std::map<MemberId, Contribution>;
  // Where the journal of a shard ends.
  struct Recovered {
    struct Bucket {
      bool closed = false;     // in `round`
      Contributions current;   // of `round`, where it is closed
      Contributions previous;  // of the round before
    };
    struct Worker {
      std::string name;
      uint64_t incarnation = 0;
    };
    uint64_t round = 0;
    std::vector<Bucket> buckets;
    std::vector<Worker> workers;  // of the last closed bucket: the open round waits for them
  };
  // How far ahead of the open round a worker may ask to start.
  static constexpr uint64_t kMaxRoundsAhead = 64;

  explicit RoundMachine(const Rules& rules);

  // Membership is effective at a round boundary: a worker that joins while round r is open contributes from r + 1 on.
  // It starts at r itself when r has not opened yet, or when r has no members and no bucket of it has closed.
  // `not_before`: a worker of several shards asks every one for the latest start it was given.
  // `may_initialize`: see SetMayInitialize.
  // Errors: those of Membership::Join; InvalidArgument when `not_before` is too far ahead.
  absl::StatusOr<JoinOutcome> Join(std::string_view worker, uint64_t incarnation, uint64_t not_before,
                                   bool may_initialize, TimeNs now, RoundActions* actions);
  // A worker that was a member goes on with `round` after its connection broke or this server restarted: it is in the
  // open round at once. What it sent before is known by its digests. Errors: DataLoss (it has seen a later version than
  // there is here), FailedPrecondition (its round is over for good, or there are no parameters yet), those of Join.
  absl::StatusOr<JoinOutcome> Resume(std::string_view worker, uint64_t incarnation, uint64_t round, TimeNs now,
                                     RoundActions* actions);
  // Takes a fresh machine, with parameters, to where a journal ends. Workers get a fresh lease.
  void Restore(const Recovered& recovered, TimeNs now);
  // Of the open round or the one before; empty for others.
  Contributions ContributionsOf(uint32_t bucket, uint64_t round) const;
  void Leave(MemberId id, RoundActions* actions);
  // Ends the leases that have run out.
  void Tick(TimeNs now, RoundActions* actions);
  void Renew(MemberId id, TimeNs now) { membership_.Renew(id, now); }
  // What the latest join or heartbeat of `id` said. Only members that may are chosen to send the initial parameters;
  // one that no longer may is replaced.
  void SetMayInitialize(MemberId id, bool may_initialize, RoundActions* actions);

  // May `id` upload initial parameters of `bucket`? Ok: yes. AlreadyExists: they are complete. FailedPrecondition:
  // another worker was chosen (named).
  absl::Status CheckInitializer(MemberId id, uint32_t bucket) const;
  // `bucket` was uploaded completely by `id`, for which CheckInitializer was ok.
  void Initialized(MemberId id, uint32_t bucket, RoundActions* actions);

  // May the first bytes of a frame be merged? A contribution that was seen before is judged by Repeat, once its digest
  // is known. Errors: FailedPrecondition (the round is not open yet, or the worker starts later; names both rounds),
  // NotFound (not a member).
  absl::StatusOr<PushVerdict> Classify(MemberId id, uint32_t bucket, uint64_t round) const;
  // A repeated frame: ok when it is the same, FailedPrecondition when its bytes differ.
  absl::Status Repeat(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest) const;
  // A whole frame is in the accumulator. kAccept: it counts. Otherwise the owner takes it out again.
  absl::StatusOr<PushVerdict> Complete(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest,
                                       RoundActions* actions);
  // The worker contributes nothing to (bucket, round): by its own word, or because its frame was refused. A good frame
  // that comes before the bucket closes replaces this.
  absl::StatusOr<PushVerdict> Abstain(MemberId id, uint32_t bucket, uint64_t round, RoundActions* actions);

  // The next version that every bucket passes: that of the open round while none of its buckets has closed.
  uint64_t NextBoundary() const { return closed_ == 0 ? round_ : round_ + 1; }
  uint64_t round() const { return round_; }  // the open one, or the one that will open next
  bool open() const { return open_; }
  bool initialized() const { return initialized_; }
  bool MustInitialize(MemberId id) const { return !initialized_ && initializer_ == id; }
  bool InRound(const Member& member) const { return member.start_round <= round_; }
  uint32_t MembersOfRound() const;
  bool RoundHasContributions() const;
  const Membership& membership() const { return membership_; }

 private:
  struct BucketRound {
    bool closed = false;
    uint32_t included = 0;
    Contributions contributions;
  };

  absl::Status CheckRound(MemberId id, uint32_t bucket, uint64_t round) const;
  const std::vector<BucketRound>* BucketsOf(uint64_t round) const;  // null: forgotten, or not open yet
  const Contribution* FindContribution(MemberId id, uint32_t bucket, uint64_t round) const;
  uint64_t StartRoundOfNewcomer() const;
  void Lose(const std::vector<Member>& lost, RoundActions* actions);
  void ElectInitializer(RoundActions* actions);
  bool Closable(const BucketRound& bucket) const;
  void CloseIfComplete(uint32_t bucket, RoundActions* actions);
  // Opens round 0, closes what can be closed, opens later rounds, until nothing changes.
  void Advance(RoundActions* actions);

  const Rules rules_;
  Membership membership_;
  uint64_t round_ = 0;
  bool open_ = false;
  bool initialized_ = false;
  std::optional<MemberId> initializer_;
  std::vector<bool> uploaded_;  // buckets whose initial parameters are here
  uint32_t uploaded_count_ = 0;
  std::vector<BucketRound> current_;
  std::vector<BucketRound> previous_;  // of round_ - 1: to recognise repeats
  uint32_t closed_ = 0;                // buckets of current_
};

}  // namespace gradwire

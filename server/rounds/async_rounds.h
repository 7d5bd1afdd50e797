// Asynchronous rounds of one job on one shard, as a pure state machine: every frame makes a version of its bucket, and
// nobody waits for anybody. A frame's `round` is the version of its bucket that its worker computed on; a worker that
// pushed goes on from a later one, so (incarnation, round, bucket) names a frame as it does in synchronous rounds.
// What the rules are and why: proto/ROUNDS.md.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "server/rounds/initialization.h"
#include "server/rounds/membership.h"
#include "server/rounds/push_history.h"
#include "server/rounds/rounds.h"

namespace gradwire {

class AsyncRounds final : public Rounds {
 public:
  struct Rules {
    uint32_t buckets = 0;
    uint32_t window = 1;  // frames computed on the last so many versions are merged
    bool needs_initialization = true;
    bool recognize_repeats = true;  // as in JointRounds
    Membership::Rules membership;
  };

  // Frames of a bucket that are known of each worker: it has one unanswered, and begins the next one once it is
  // answered.
  static constexpr uint32_t kFramesKnown = 2;

  explicit AsyncRounds(const Rules& rules);

  // A newcomer takes the newest version of every bucket, whichever that is: start_version is 0.
  absl::StatusOr<JoinOutcome> Join(std::string_view worker, uint64_t incarnation, uint64_t not_before,
                                   bool may_initialize, TimeNs now, RoundActions* actions) override;
  // There is nothing to catch up with: start_version is point.round.
  absl::StatusOr<JoinOutcome> Resume(std::string_view worker, uint64_t incarnation, const ResumePoint& point,
                                     TimeNs now, RoundActions* actions) override;
  // FailedPrecondition: a worker of this mode never has to.
  absl::StatusOr<JoinOutcome> CatchUp(std::string_view worker, uint64_t incarnation, uint64_t not_before, TimeNs now,
                                      RoundActions* actions) override;
  absl::Status CheckNothingLost(std::string_view worker, const ResumePoint& point) const override;
  void Restore(const Recovered& recovered, TimeNs now) override;
  void RestoreContribution(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest) override;
  void Leave(MemberId id, TimeNs now, RoundActions* actions) override;
  void Tick(TimeNs now, RoundActions* actions) override;
  std::optional<TimeNs> NextTick() const override { return membership_.NextExpiry(); }
  void Renew(MemberId id, TimeNs now) override { membership_.Renew(id, now); }
  void Excuse(TimeNs slept, TimeNs now) override { membership_.Excuse(slept, now); }
  void SetMayInitialize(MemberId id, bool may_initialize, RoundActions* actions) override;

  absl::Status CheckInitializer(MemberId id, uint32_t bucket) const override;
  void Initialized(MemberId id, uint32_t bucket, TimeNs now, RoundActions* actions) override;

  // A frame on version 0 calibrates and carries no values: only the first one of a bucket is merged.
  absl::StatusOr<PushVerdict> Classify(MemberId id, uint32_t bucket, uint64_t round) const override;
  absl::Status Repeat(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest) const override;
  // kAccept closes the bucket at once: the owner finishes it before it completes another frame of the bucket.
  absl::StatusOr<PushVerdict> Complete(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest, TimeNs now,
                                       RoundActions* actions) override;
  // Nobody waits for it: without effect.
  absl::StatusOr<PushVerdict> Abstain(MemberId id, uint32_t bucket, uint64_t round, TimeNs now,
                                      RoundActions* actions) override;
  void NoteLate(MemberId, uint64_t, TimeNs) override {}
  bool MayAskFor(uint32_t, uint64_t) const override { return false; }  // updates are not pulled
  std::vector<PushHistory::Merged> MergedOf(uint32_t bucket) const override { return history_.Of(bucket); }

  std::optional<uint64_t> NextBoundary() const override { return std::nullopt; }
  std::optional<uint64_t> MostApart() const override { return std::nullopt; }
  uint64_t NextVersionOf(uint32_t bucket) const override { return versions_[bucket]; }
  uint64_t round() const override;  // the version that every bucket has passed
  bool open() const override { return initialized(); }
  bool initialized() const override { return initialization_.done(); }
  bool MustInitialize(MemberId id) const override { return initialization_.Chosen(id); }
  bool InRound(const Member&) const override { return true; }
  bool Awaits(const Member&) const override { return false; }
  TimeNs HeldUp(const Member&, TimeNs) const override { return 0; }
  const Membership& membership() const override { return membership_; }
  Status status() const override {
    Status status;
    status.members = static_cast<uint32_t>(membership_.members().size());
    status.histories = history_.incarnations();
    return status;
  }

 private:
  absl::StatusOr<JoinOutcome> Enter(std::string_view worker, uint64_t incarnation, bool may_initialize, TimeNs now,
                                    RoundActions* actions);
  void Lose(const std::vector<Member>& lost, RoundActions* actions);

  const Rules rules_;
  Membership membership_;
  PushHistory history_;
  Initialization initialization_;
  std::vector<uint64_t> versions_;   // per bucket, once what has closed is applied
  std::vector<uint64_t> recovered_;  // when the journal had been replayed
};

}  // namespace gradwire

// Where the records of one job go: to its journal, and to the standbys that follow it. A version is visible when both
// say so. Sits between JobShard and Journal. Contract: proto/REPLICATION.md, "In sync".
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/base/clock.h"
#include "server/job/copy_position.h"
#include "server/job/update_sink.h"

namespace gradwire {

// One standby of one job, as the sink sees it. Outlives its time between Attach and Detach.
class RecordFollower {
 public:
  virtual ~RecordFollower() = default;
  virtual const std::string& name() const = 0;
  // Takes an update, in the order of the journal. Called under the sink's lock: returns at once, calls nobody.
  virtual void Enqueue(const journal::Record& record) = 0;
  // Rounds may begin to wait for it. Called under the sink's lock.
  virtual bool MayBeWaitedFor() const { return true; }
};

// What the sinks of a server share. Called without a lock held.
struct ReplicationHooks {
  // Nothing becomes visible from then on, as long as it is not set to later. Outlives the sinks.
  const std::atomic<TimeNs>* serve_until = nullptr;
  // Initial parameters were journaled: the job may be followed from now on.
  std::function<void()> changed;
  // May be empty. A standby in sync is gone, or the job's first update is journaled, and one may hold itself for in
  // sync that has not heard of this job: nothing becomes visible until Forgive.
  std::function<void()> lost_sync;
  // Of the records that pass: nobody else's. Whoever has followed this history up to some record has all before it.
  uint64_t history = 0;
  bool following = false;  // until Serve the records are another server's, which waits for this one
};

// Thread-safe. Owned by its JobShard. Bounded by its rounds: what waits here is not visible, so no round follows it.
// Once a standby has come, the newest kRecentBytes of updates are kept as well, for one that comes back.
class ReplicatedSink final : public UpdateSink {
 public:
  static constexpr uint64_t kRecentBytes = 64u << 20;

  // `clock` outlives the sink.
  ReplicatedSink(std::unique_ptr<UpdateSink> journal, Clock* clock, ReplicationHooks hooks);
  ~ReplicatedSink() override;

  void Append(journal::Record record, std::function<void()> visible) override;
  void Stop() override;
  journal::JournalStatus status() const override;
  void SnapshotTaken(uint64_t version, uint64_t keep_from) override { journal_->SnapshotTaken(version, keep_from); }

  // From now on `follower` is given every update. Nobody waits for it yet.
  void Attach(RecordFollower* follower);
  // It is given a state of `bucket` at `version`; once that was said of every bucket it may come into sync.
  void GiveState(RecordFollower* follower, uint32_t bucket, uint64_t version);
  void StatesGiven(RecordFollower* follower);
  // Instead of the three: it has a copy of this history, and is given all that followed. False where it is not this
  // history, where an update that made one of the positions is another one here, or no longer known: then nothing has
  // happened. `copy`: per bucket.
  bool GoOn(RecordFollower* follower, uint64_t history, const std::vector<CopyPosition>& copy);
  uint64_t history() const { return hooks_.history; }
  // Nothing is given to it, and nobody waits for it, when this returns.
  void Detach(RecordFollower* follower);
  // It has taken what makes `version` of a bucket. Calls what becomes visible. InvalidArgument where it was not given
  // that; else whether it came into sync by it.
  absl::StatusOr<bool> Take(RecordFollower* follower, uint32_t bucket, uint64_t version);
  // Time has passed, and it may be waited for now: whether it came into sync by that.
  bool Reconsider(RecordFollower* follower);
  bool InSync(const RecordFollower* follower) const;
  bool WaitedFor(const RecordFollower* follower) const;
  // Since when something waits for it; none: nothing does.
  std::optional<TimeNs> WaitingSince(const RecordFollower* follower) const;
  // This server was promoted; whether standbys of its new epoch know of the job from the start.
  void Serve(bool has_parameters);
  // Nothing becomes visible any more.
  void Fence();
  // How often lost_sync was called. Goes on without the standbys of the first `losses` of them.
  uint64_t losses() const;
  void Forgive(uint64_t losses);
  // serve_until is later now: calls what had to wait for that.
  void Resume();

 private:
  using Visible = std::function<void()>;
  struct Pending {
    uint64_t version = 0;
    TimeNs appended = 0;
    bool journaled = false;
    Visible visible;
  };
  struct Bucket {
    std::deque<Pending> pending;
    uint64_t visible = 0;
  };
  struct Tap {
    RecordFollower* follower = nullptr;
    bool states_given = false;
    bool waited_for = false;
    bool in_sync = false;
    // Per bucket: one more than the version; 0: none.
    std::vector<uint64_t> given;
    std::vector<uint64_t> taken;
  };

  Tap* TapOf(const RecordFollower* follower) ABSL_SHARED_LOCKS_REQUIRED(mu_);
  const Tap* TapOf(const RecordFollower* follower) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  void Journaled(uint32_t bucket, uint64_t version);
  // Takes what of a bucket has become visible.
  void TakeReady(uint32_t bucket, std::vector<Visible>* ready) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Judge(Tap& tap) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CallAll(const std::vector<Visible>& ready) ABSL_LOCKS_EXCLUDED(mu_);
  void KeepRecent(const journal::Record& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The updates that made the positions. Fewer than positions: some are not known any more, or it is another history.
  std::vector<journal::Record> Made(uint64_t history, const std::vector<CopyPosition>& copy) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);

  const std::unique_ptr<UpdateSink> journal_;
  Clock* const clock_;
  const ReplicationHooks hooks_;

  mutable absl::Mutex mu_;
  std::vector<Bucket> buckets_ ABSL_GUARDED_BY(mu_);  // grows on demand
  std::vector<Tap> taps_ ABSL_GUARDED_BY(mu_);
  bool keeps_recent_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<journal::Record> recent_ ABSL_GUARDED_BY(mu_);
  uint64_t recent_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  int calling_ ABSL_GUARDED_BY(mu_) = 0;
  bool following_ ABSL_GUARDED_BY(mu_);
  bool begun_ ABSL_GUARDED_BY(mu_) = false;  // every standby of the present epoch knows of this job
  uint64_t losses_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t forgiven_ ABSL_GUARDED_BY(mu_) = 0;  // of losses_: nobody who was lost by these takes over any more
  bool over_ ABSL_GUARDED_BY(mu_) = false;      // stopped or fenced
};

}  // namespace gradwire

// One standby of this server: what goes to it on its Follow stream, on a thread of its own or in turns that its owner
// takes. Contract: proto/REPLICATION.md.
//
//   ReplicatedSink::Append -> queue -> [turns: begins jobs, sends records and beats] -> stream
//   stream -> OnRequest -> ReplicatedSink::Take -> versions become visible
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "common/base/clock.h"
#include "common/storage/lineage.h"
#include "gradwire/v1/replication.pb.h"
#include "server/desk/outbox.h"
#include "server/job/job_registry.h"
#include "server/replication/replicated_sink.h"
#include "server/replication/sync_patience.h"

namespace gradwire {

// What all standbys of a server share. Outlives their feeds.
struct FeedShare {
  // Records that wait to be sent, of all feeds together. When there are more, a feed that holds more than its own part
  // ends.
  uint64_t queue_limit_bytes = 256u << 20;
  uint32_t feeds = 1;  // the most that there are
  std::atomic<uint64_t> queued_bytes{0};
  SyncPatience patience;
};

struct FeedOptions {
  std::string name;  // of the standby: a server's name
  int64_t timeout_ms = 5000;
  FeedShare* share = nullptr;
  Lineage lineage;  // this server's
  // What it has of jobs.
  std::vector<v1::FollowCopy> copies;
  bool thread = true;  // of its own; else whoever owns it calls TakeTurn
};

// Thread-safe. Owns its thread, if it has one, from Start to Stop. Owned by its stream.
class Feed {
 public:
  // `registry` and `clock` outlive the feed.
  Feed(FeedOptions options, JobRegistry* registry, Clock* clock, std::shared_ptr<Outbox> out);
  ~Feed();
  Feed(const Feed&) = delete;
  Feed& operator=(const Feed&) = delete;

  // ResourceExhausted: there is no thread for it.
  absl::Status Start();
  // What the standby says. An error ends the stream.
  absl::Status OnRequest(const v1::FollowRequest& request);
  // Jobs came, got their parameters or went.
  void JobsChanged();
  // Tells who is in sync, and this server's epoch, at the next opportunity.
  void BeatSoon();
  // Without a thread: sends what there is to send. One call at a time, and none once Stop was called. When the next one
  // is due, unless something happens before.
  TimeNs TakeTurn();
  // Drops a standby that is silent, does not keep up, or has not taken a record for too long; ends at once the stream
  // of one that was dropped and does not read that.
  void Tick();
  // Ends the stream: nobody waits for this standby when it returns.
  void Drop(const absl::Status& why);
  // The stream has closed.
  void Stop();
  const std::string& name() const { return options_.name; }
  // It was dropped or stopped, and lives until its stream has closed.
  bool over() const;

 private:
  class Tap;
  struct Entry {
    uint32_t job = 0;
    journal::Record record;
  };

  void Run();
  // False: there is none any more.
  bool TryTurn();
  absl::Status Turn();
  // A turn would find nothing to do before its next beat.
  bool Idle() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status SendQueue();
  // Begins jobs that are new, ends those that are gone.
  absl::Status Reconcile();
  absl::Status Begin(uint32_t number, const JobRegistry::DurableJob& job);
  // Where its copy of the job is one to go on from.
  bool GoOn(Tap& tap, const JobRegistry::DurableJob& job);
  absl::Status SendRecord(uint32_t job, const journal::Record& record);
  absl::Status SendBeat();
  absl::Status Send(const v1::FollowMessage& message, std::vector<Bytes> frame = {});
  void Enqueue(uint32_t job, const journal::Record& record);
  void ClearQueue() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status KeepsUp() const;
  void CameIntoSync(const Tap& tap);
  void DetachAll();
  std::vector<std::shared_ptr<Tap>> Taps() const;

  const FeedOptions options_;
  JobRegistry* const registry_;
  Clock* const clock_;
  const std::shared_ptr<Outbox> out_;
  std::atomic<TimeNs> heard_;
  std::atomic<TimeNs> in_sync_since_{0};  // with its first job; 0: never
  std::thread thread_;

  mutable absl::Mutex mu_;  // after ReplicatedSink's
  absl::CondVar wake_;
  std::map<uint32_t, std::shared_ptr<Tap>> taps_ ABSL_GUARDED_BY(mu_);  // by number
  uint32_t next_number_ ABSL_GUARDED_BY(mu_) = 0;
  std::deque<Entry> queue_ ABSL_GUARDED_BY(mu_);
  uint64_t queue_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  bool changed_ ABSL_GUARDED_BY(mu_) = true;
  bool beat_now_ ABSL_GUARDED_BY(mu_) = false;
  bool overflowed_ ABSL_GUARDED_BY(mu_) = false;  // nothing is queued any more
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  TimeNs dropped_at_ ABSL_GUARDED_BY(mu_) = 0;  // 0: it was not
  // Of whoever takes the turns.
  bool greeted_ = false;
  TimeNs next_beat_ = 0;
};

}  // namespace gradwire

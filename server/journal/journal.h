// The journal of one job on one shard: a thread that writes records and syncs them in groups, and says when they may be
// seen. Sits between JobShard (UpdateSink) and JournalWriter.
//
//   Append -> queue -> [journal thread: write all that waits, sync once, call their `visible`] -> versions
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "common/base/clock.h"
#include "common/journal/journal_writer.h"
#include "server/job/update_sink.h"
#include "server/job/warning_limiter.h"

namespace gradwire::journal {

enum class Level {
  kFsync,     // visible when synced
  kInterval,  // visible when written; synced every sync_interval_ns
};

enum class OnFailure {
  kWait,      // rounds wait until the disk is well again
  kContinue,  // rounds go on; what cannot be written is kept up to backlog_limit_bytes
};

struct JournalOptions {
  std::string job;  // for messages
  Level level = Level::kFsync;
  OnFailure on_failure = OnFailure::kWait;
  TimeNs sync_interval_ns = 1'000'000'000;
  // kInterval: synced before its time when this much waits. It stays in memory until then, to be written again should
  // the sync fail.
  uint64_t unsynced_limit_bytes = 64u << 20;
  // kContinue: more than this is given up; then only a snapshot makes the job durable again.
  uint64_t backlog_limit_bytes = 256u << 20;
  TimeNs first_retry_ns = 50'000'000;
  TimeNs last_retry_ns = 2'000'000'000;
};

// Thread-safe. Owns its thread, from Start to Stop. Bounds: the queue holds at most one round of every bucket with
// kWait (rounds wait for it); with kContinue the backlog is bounded by its limit.
class Journal final : public UpdateSink {
 public:
  // `clock` outlives the journal.
  Journal(JournalOptions options, std::unique_ptr<JournalWriter> writer, Clock* clock);
  ~Journal() override;
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  void Start();
  void Append(Record record, std::function<void()> visible) override;
  void Stop() override;
  JournalStatus status() const override;
  void SnapshotTaken(uint64_t version, uint64_t keep_from) override;

  // One turn of the thread: takes what waits, writes, syncs if it is time, calls back. Returns when it wants to be
  // called again at the latest, if nothing is appended. By one thread at a time; for simulators, which call no Start.
  TimeNs Pump();

 private:
  using Visible = std::function<void()>;
  struct Entry {
    Record record;
    Visible visible;
  };

  void Run();
  // Writes what was taken, and syncs where the level or the time asks for it.
  void Write(std::vector<Entry> taken, TimeNs now);
  void Cut();
  // After a try: logs what changed and sets the time of the next one.
  void NoteHealth(TimeNs now);
  void LimitBacklog();
  void PublishStatus(uint64_t taken);
  TimeNs NextTurn() const;
  bool degraded() const { return !writer_->status().ok(); }

  const JournalOptions options_;
  Clock* const clock_;

  // Of the thread that pumps.
  const std::unique_ptr<JournalWriter> writer_;
  std::vector<Visible> waiting_;  // of records that are not synced (kFsync) or written (kInterval) yet
  TimeNs next_sync_ = 0;
  TimeNs retry_at_ = 0;
  TimeNs retry_ns_ = 0;
  bool was_degraded_ = false;
  uint64_t cut_to_ = 0;    // what a snapshot lets go is removed up to here; 0: nothing is to be removed
  uint64_t hole_end_ = 0;  // version behind the records that were given up; 0: none were
  WarningLimiter warnings_;

  std::thread thread_;
  mutable absl::Mutex mu_;
  absl::CondVar wake_;
  std::vector<Entry> queue_ ABSL_GUARDED_BY(mu_);
  uint64_t keep_from_ ABSL_GUARDED_BY(mu_) = 0;         // for cut_to_
  uint64_t snapshot_version_ ABSL_GUARDED_BY(mu_) = 0;  // the newest that was taken
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  JournalStatus status_ ABSL_GUARDED_BY(mu_);
};

}  // namespace gradwire::journal

// Takes the snapshots of one job on one shard: when the journal has grown by so much, when it has given records up and
// the disk is well again, and when somebody asks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/base/background_work.h"
#include "common/snapshot/snapshot_files.h"
#include "server/job/job_shard.h"

namespace gradwire {

inline constexpr size_t kSnapshotsKept = 2;  // of one job

// Returns work(), done wherever it delays nobody.
using Aside = std::function<absl::Status(const std::function<absl::Status()>& work)>;

// Writes a snapshot of `shard` at the version that its round in progress makes, waits for that round for at most
// `patience`, and lets go of the snapshots and of the journal that are not needed any more. What takes long and no lock
// is done by `aside`. Errors: those of Snapshots::Gather, of `files` and of `aside`.
absl::Status TakeSnapshot(JobShard& shard, SnapshotFiles& files, absl::Duration patience, const Aside& aside);

// Thread-safe. Owns its thread, from construction to destruction. In memory: one copy of the shard's parameters and
// moments, while a snapshot is taken (counted in MemoryBound).
class Snapshotter {
 public:
  // `journal_bytes`: of growth, after which a snapshot is taken. The disk outlives this.
  Snapshotter(std::shared_ptr<JobShard> shard, Disk* disk, const std::string& directory, uint64_t journal_bytes);
  ~Snapshotter();
  Snapshotter(const Snapshotter&) = delete;
  Snapshotter& operator=(const Snapshotter&) = delete;

  // Wants a snapshot soon. How it went is in the job's status.
  void Request();
  // The server ends: what is being taken, or is still to come, takes all the time that it can get.
  void Hurry() { background_.Hurry(); }

 private:
  void Run();
  bool Due();

  const std::shared_ptr<JobShard> shard_;
  SnapshotFiles files_;  // of the thread
  const uint64_t journal_bytes_;

  mutable absl::Mutex mu_;
  absl::CondVar wake_;
  bool requested_ ABSL_GUARDED_BY(mu_) = false;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t journal_at_last_ = 0;  // bytes of the journal at its shortest since the last snapshot; of the thread
  BackgroundWork background_;
  std::thread thread_;
};

}  // namespace gradwire

// The jobs of this server: found by name, created on first use, bounded in number and memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/storage/data_directory.h"
#include "server/job/job_shard.h"
#include "server/job/warning_limiter.h"
#include "server/replication/epoch.h"
#include "server/replication/replicated_sink.h"
#include "server/snapshot/snapshotter.h"

namespace gradwire {

// Thread-safe. Owns the jobs; streams that are open on a deleted job keep it alive until they have closed.
class JobRegistry {
 public:
  struct Limits {
    uint64_t memory_bytes = 0;  // of all jobs together
    uint32_t max_jobs = 0;
    uint64_t snapshot_journal_bytes = 1ull << 30;  // a snapshot is taken when a journal has grown by this
    TimeNs unused_job_ns = 0;                      // a job of durability none without workers ends after this; 0: never
  };

  // A job with a journal, and where its records pass.
  struct DurableJob {
    std::shared_ptr<JobShard> shard;
    ReplicatedSink* sink = nullptr;  // the shard's
    uint64_t followed_history = 0;   // of a standby: whose records these are; 0: nobody's
  };

  // `data` may be null: jobs that ask for durability are refused. It outlives the registry.
  JobRegistry(const JobEnvironment& environment, const Limits& limits, DataDirectory* data = nullptr)
      : environment_(WithAccount(environment, limits)), limits_(limits), data_(data) {}

  // Before any job is made: called when durable jobs come, get their parameters or go. Takes no lock of the registry.
  void SetOnChange(std::function<void()> on_change) { on_change_ = std::move(on_change); }

  // Before any job is made, too: called when a standby that rounds waited for is gone. Rounds then wait for
  // ReplicatedSink::Forgive.
  void SetOnLostSync(std::function<void()> on_lost_sync) { on_lost_sync_ = std::move(on_lost_sync); }

  // Makes the jobs of the data directory anew, before anybody joins. A job that cannot be recovered is told of in the
  // log, and to everybody who asks for it, until it is deleted. `following`: this is a standby, so the jobs stay open
  // to further records. The epoch is raised above those of the journals: nobody was told it yet.
  absl::Status Recover(bool following) { return RecoverAll(following, /*starting=*/true); }

  // On a standby: an empty shard of this job, stored, to be given records (Recovery::Follow). Replaces what is here of
  // this name. layout_digest: of the primary's shard map; history: of the records that will follow. Errors as of
  // GetOrCreate.
  absl::StatusOr<std::shared_ptr<JobShard>> Adopt(const v1::StoredJob& stored, uint64_t layout_digest,
                                                  uint64_t history);
  // As Adopt, but goes on from what is here of this history. FailedPrecondition where nothing is.
  absl::StatusOr<std::shared_ptr<JobShard>> GoOn(const v1::StoredJob& stored, uint64_t layout_digest, uint64_t history);
  // The standby was promoted: opens every job to workers. A job that cannot be opened is told of as in Recover.
  void EndFollowing();
  // After FenceAll: this server becomes a standby. Durable jobs are opened again from what is stored, as in Recover;
  // the others are gone.
  absl::Status BeginFollowing();
  // After `until` nothing becomes visible, until this is called again. Before the first call there is no end.
  void ServeUntil(TimeNs until);
  TimeNs serve_until() const { return serve_until_; }
  // Another server has taken over: ends every stream with `status`, and nothing becomes visible any more.
  void FenceAll(const absl::Status& status);
  std::vector<DurableJob> Durable() const;

  // The job of this spec, made if there is none of its name. layout_digest 0: not compared. Errors: InvalidArgument
  // (spec), FailedPrecondition (another job of this name; says what differs), ResourceExhausted (memory, number of
  // jobs), Unavailable (draining, a standby, or many wait for this job to be made), DataLoss (the job is here but could
  // not be recovered), those of the disk.
  absl::StatusOr<std::shared_ptr<JobShard>> GetOrCreate(const v1::JobSpec& spec, uint32_t shard_index,
                                                        uint32_t shard_count, uint64_t layout_digest);
  // Wants a snapshot soon. FailedPrecondition for a job that is not durable.
  absl::Status RequestSnapshot(std::string_view name);
  // NotFound names the job and says how to make it.
  absl::StatusOr<std::shared_ptr<JobShard>> Find(std::string_view name) const;
  std::vector<std::shared_ptr<JobShard>> All() const;
  uint64_t unrecovered() const;  // jobs that are stored here and could not be recovered, or not removed
  // A worker learned that this job has nothing here of what the other shards have: unless somebody uses it, it is
  // forgotten, so that what is put in its place finds nothing in the way.
  void ForgetUnused(const std::shared_ptr<JobShard>& job);
  // Ends the job's streams and forgets the job. After an error of the disk what is stored of it stays; whoever asks for
  // the job is told so, until it is deleted again.
  absl::Status Delete(std::string_view name);
  // As Delete. FailedPrecondition where the job has workers or is not at `version`, if one is given.
  absl::Status DeleteUnused(std::string_view name, std::optional<uint64_t> version);

  // From now on nobody joins and nothing is created.
  void Drain();
  bool draining() const;
  // The server is about to end: snapshots are taken as fast as they can be.
  void HurrySnapshots();
  // Ends every stream with `status`.
  void ShutAll(const absl::Status& status);

  // JobShard::Tick of every job at one time, and the end of jobs that nobody uses; writes what warnings were held back.
  void Tick(WorkPool* pool = nullptr, TimeNs slept = 0);
  // Writes that `what` was refused with `status`, or counts it where one like it was written just now.
  void WarnRefused(std::string_view what, const absl::Status& status);

  uint64_t memory_bytes() const;
  const Limits& limits() const { return limits_; }
  const JobEnvironment& environment() const { return environment_; }

 private:
  static JobEnvironment WithAccount(JobEnvironment environment, const Limits& limits);
  // The job of this name; null: there is none, and this call has begun to make it, which EndMaking ends. Waits while
  // another one makes it. Errors: as of GetOrCreate.
  absl::StatusOr<std::shared_ptr<JobShard>> FindOrBegin(const std::string& name);
  // Returns when nobody makes a job of this name. Unavailable: too many wait already.
  absl::Status AwaitMade(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void EndMaking(const std::string& name);
  // Makes the directory of a new job, and its journal. followed_history 0: the history is this server's own.
  absl::StatusOr<ReplicatedSink*> Store(JobShard& shard, uint64_t followed_history)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(create_mu_);
  // Replays what is stored of the job, and sets its sink.
  absl::StatusOr<ReplicatedSink*> OpenSink(JobShard& shard, bool following, bool starting)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(create_mu_);
  // `sink`: null where the job is not durable. ResourceExhausted: no thread for its snapshots.
  absl::Status Insert(const std::shared_ptr<JobShard>& shard, ReplicatedSink* sink, uint64_t followed_history = 0)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(create_mu_);
  // As Insert, of a job that was stored just now: after an error nothing of it stays.
  absl::Status InsertNew(const std::shared_ptr<JobShard>& shard, ReplicatedSink* sink, uint64_t followed_history)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(create_mu_);
  uint64_t Term() const { return TermOf(environment_.epochs->now()); }
  // `starting`: nobody was told this server's epoch yet; a journal of a later one raises it.
  absl::Status RecoverAll(bool following, bool starting);
  absl::Status RecoverJob(const std::string& name, bool following, bool starting)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(create_mu_);
  // Takes the job out, ends it and removes what is stored of it.
  absl::Status Remove(std::string_view name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(create_mu_);
  void NoteUnrecovered(const std::string& name, const absl::Status& why);
  // job_unused.cc
  void EndUnused();
  absl::Status TooManyJobs(std::string_view wanted) const;
  uint64_t SegmentBytes() const;

  const JobEnvironment environment_;
  const Limits limits_;
  DataDirectory* const data_;
  std::function<void()> on_change_ = [] {};
  std::function<void()> on_lost_sync_;
  std::atomic<TimeNs> serve_until_{std::numeric_limits<TimeNs>::max()};
  WarningLimiter refusals_;

  // Jobs come and go one at a time, while others are served. What takes long of making one is done before.
  absl::Mutex create_mu_ ABSL_ACQUIRED_BEFORE(mu_);
  mutable absl::Mutex mu_;
  std::map<std::string, std::shared_ptr<JobShard>, std::less<>> jobs_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, DurableJob, std::less<>> durable_ ABSL_GUARDED_BY(mu_);  // of jobs_
  std::map<std::string, absl::Status, std::less<>> unrecovered_ ABSL_GUARDED_BY(mu_);
  std::set<std::string, std::less<>> making_ ABSL_GUARDED_BY(mu_);           // names of jobs that are being made
  std::map<std::string, size_t, std::less<>> waiting_ ABSL_GUARDED_BY(mu_);  // calls that wait for one, by its name
  size_t waiters_ ABSL_GUARDED_BY(mu_) = 0;                                  // for all of them
  bool following_ ABSL_GUARDED_BY(mu_) = false;  // until EndFollowing nobody joins and nothing is created
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  // Of durable jobs. Destroyed before the jobs, and never under mu_: their destructors wait for threads.
  std::map<std::string, std::unique_ptr<Snapshotter>, std::less<>> snapshotters_ ABSL_GUARDED_BY(mu_);
};

}  // namespace gradwire

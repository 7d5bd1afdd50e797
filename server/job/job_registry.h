// The jobs of this server: found by name, created on first use, bounded in number and memory.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
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
#include "server/snapshot/snapshotter.h"

namespace gradwire {

// Thread-safe. Owns the jobs; streams that are open on a deleted job keep it alive until they have closed.
class JobRegistry {
 public:
  struct Limits {
    uint64_t memory_bytes = 0;  // of all jobs together
    uint32_t max_jobs = 0;
    uint64_t snapshot_journal_bytes = 1ull << 30;  // a snapshot is taken when a journal has grown by this
  };

  // `data` may be null: jobs that ask for durability are refused. It outlives the registry.
  JobRegistry(const JobEnvironment& environment, const Limits& limits, DataDirectory* data = nullptr)
      : environment_(environment), limits_(limits), data_(data) {}

  // Makes the jobs of the data directory anew, before anybody joins. A job that cannot be recovered is told of in the
  // log, and to everybody who asks for it, until it is deleted.
  absl::Status Recover();

  // The job of this spec, made if there is none of its name. layout_digest 0: not compared. Errors: InvalidArgument
  // (spec), FailedPrecondition (another job of this name; says what differs), ResourceExhausted (memory, number of
  // jobs), Unavailable (draining), DataLoss (the job is here but could not be recovered), those of the disk.
  absl::StatusOr<std::shared_ptr<JobShard>> GetOrCreate(const v1::JobSpec& spec, uint32_t shard_index,
                                                        uint32_t shard_count, uint64_t layout_digest);
  // Wants a snapshot soon. FailedPrecondition for a job that is not durable.
  absl::Status RequestSnapshot(std::string_view name);
  // NotFound names the job and says how to make it.
  absl::StatusOr<std::shared_ptr<JobShard>> Find(std::string_view name) const;
  std::vector<std::shared_ptr<JobShard>> All() const;
  // Ends the job's streams and forgets it.
  absl::Status Delete(std::string_view name);

  // From now on nobody joins and nothing is created.
  void Drain();
  bool draining() const;
  // Ends every stream with `status`.
  void ShutAll(const absl::Status& status);

  // Ends leases that have run out, in every job, and writes what warnings were held back.
  void Tick();
  // Writes that a stream was ended with `status`, or counts it where one like it was written just now.
  void WarnStream(std::string_view which, const absl::Status& status);

  uint64_t memory_bytes() const;
  const Limits& limits() const { return limits_; }
  const JobEnvironment& environment() const { return environment_; }
  // Server epochs grow: a worker that knows a larger one speaks to a server that was replaced.
  bool epochs_grow() const { return data_ != nullptr; }

 private:
  absl::StatusOr<std::shared_ptr<JobShard>> Make(const v1::JobSpec& spec, uint32_t shard_index, uint32_t shard_count)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(create_mu_);
  // The directory of a new job, and its journal.
  absl::Status Store(JobShard& shard) ABSL_EXCLUSIVE_LOCKS_REQUIRED(create_mu_);
  void Insert(const std::shared_ptr<JobShard>& shard) ABSL_EXCLUSIVE_LOCKS_REQUIRED(create_mu_);
  uint64_t SegmentBytes() const;
  absl::Status RecoverJob(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(create_mu_);

  const JobEnvironment environment_;
  const Limits limits_;
  DataDirectory* const data_;
  WarningLimiter stream_warnings_;

  absl::Mutex create_mu_ ABSL_ACQUIRED_BEFORE(mu_);  // jobs are made and deleted one at a time, others are served
  mutable absl::Mutex mu_;
  std::map<std::string, std::shared_ptr<JobShard>, std::less<>> jobs_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, absl::Status, std::less<>> unrecovered_ ABSL_GUARDED_BY(mu_);
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  // Of durable jobs. Destroyed before the jobs, and never under mu_: that waits for their threads.
  std::map<std::string, std::unique_ptr<Snapshotter>, std::less<>> snapshotters_ ABSL_GUARDED_BY(mu_);
};

}  // namespace gradwire

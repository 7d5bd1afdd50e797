// The snapshots of a job, as far as its rounds are concerned: copies of its buckets, gathered while rounds go on, and
// how the last one went. Who takes them, and when: Snapshotter.
//
//   NewCopy -> Gather: each bucket is copied by this thread once it is there (CopyIfWanted), or by the one that takes
//   it further (BeforeUpdate), who is first; then its record is waited for (NoteSafe)
#pragma once

#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "gradwire/v1/operator.pb.h"
#include "server/job/job_parts.h"
#include "server/snapshot/shard_capture.h"

namespace gradwire {

// Thread-safe.
class Snapshots {
 public:
  explicit Snapshots(JobParts* parts) : parts_(*parts) {}

  // The memory for a copy: for Gather to fill. Takes no lock. Cancelled by BackgroundWork.
  absl::StatusOr<std::shared_ptr<ShardCapture>> NewCopy() const;
  // A copy of everything at the next version that all buckets pass, this one if no bucket of the open round has closed;
  // with asynchronous rounds of every bucket at a version of its own, which may be seen. Rounds go on. One at a time.
  // Errors: DeadlineExceeded (the round did not end in time), FailedPrecondition (no parameters yet, or not all of
  // them: a standby that is still being sent an asynchronous job), Cancelled,
  // Aborted (buckets were already past it: try again), ResourceExhausted.
  absl::Status Gather(const std::shared_ptr<ShardCapture>& copy, absl::Duration timeout);
  void Cancel();  // this one and all later ones
  // How the last one went, for the status. `version`: when it is ok.
  void NoteTaken(uint64_t version, const absl::Status& status);
  void Describe(v1::DurabilityStatus* status);

  // For who applies updates: the bucket is about to leave its version, has come to another one, or its newest record
  // is safe.
  void BeforeUpdate(BucketState& bucket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) { CopyIfWanted(bucket); }
  void AfterUpdate(BucketState& bucket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  void NoteSafe(BucketState& bucket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);

 private:
  absl::Status Begin(const std::shared_ptr<ShardCapture>& copy);
  absl::Status AwaitBuckets(ShardCapture& copy, absl::Time deadline);
  void CopyIfWanted(BucketState& bucket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);

  JobParts& parts_;

  absl::Mutex mu_;  // innermost
  std::shared_ptr<ShardCapture> copy_ ABSL_GUARDED_BY(mu_);
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t tried_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t version_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status last_ ABSL_GUARDED_BY(mu_);
};

}  // namespace gradwire

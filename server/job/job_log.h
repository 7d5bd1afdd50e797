// Where the records of a job go, and what of the job is safe there: the journal and the standbys, behind one sink.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/journal/record.h"
#include "gradwire/v1/operator.pb.h"
#include "server/job/job_parts.h"
#include "server/job/past_rounds.h"
#include "server/job/update_sink.h"

namespace gradwire {

// Thread-safe once anybody joins; until then used by whoever makes or recovers the job.
class JobLog {
 public:
  // `waits_for_shards`: what has closed is not given to the sink until the shards agree on it.
  JobLog(JobParts* parts, PastRounds* past, bool waits_for_shards)
      : parts_(*parts), past_(*past), waits_for_shards_(waits_for_shards) {}

  // Before anybody joins: what is there now is safe.
  void SetSink(std::unique_ptr<UpdateSink> sink);
  // The job was shut: nothing is journaled from here on.
  void Stop();

  // False: nothing is journaled, and Append not called.
  bool journals() const { return sink_ != nullptr; }
  // As UpdateSink::Append.
  void Append(journal::Record record, std::function<void()> visible) {
    sink_->Append(std::move(record), std::move(visible));
  }

  // A snapshot of `version` is on disk, and `oldest` is the oldest one that stays.
  void CutBehind(uint64_t version, uint64_t oldest);
  uint64_t Bytes() const;  // 0 without a journal
  // The journal has given records up and could be written again: only a snapshot makes the job durable.
  bool WantsSnapshot() const;
  // Not ok where workers have seen more than would come back if the server ended now, saying why.
  absl::Status Unsafe() const;
  // Per bucket the version that meets the job's durability here.
  std::vector<uint64_t> SafeVersions() const;

  // What a standby begins with: a record of the bucket's state and, behind it, the updates that made it, as many as
  // workers may ask for again. Waits for a round that is being applied, never for workers. Records that the sink is
  // given later go on from the state; updates that it was given before, of earlier rounds, are in the state.
  // FailedPrecondition: the job has no parameters yet.
  absl::StatusOr<std::vector<journal::Record>> CopyBucket(uint32_t bucket);

  // `version`: of the job. `recovered`: what had been recovered at the start, which is safe.
  void Describe(uint64_t version, uint64_t recovered, v1::JobStatus* job) const;

 private:
  // The version to which what has closed brings the bucket, whatever workers and other shards do.
  absl::StatusOr<uint64_t> VersionUnderWay(const BucketState& bucket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);

  JobParts& parts_;
  PastRounds& past_;
  const bool waits_for_shards_;
  std::unique_ptr<UpdateSink> sink_;
};

}  // namespace gradwire

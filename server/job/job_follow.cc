// What a standby of a job begins with; see job_shard.h.
#include <utility>

#include "common/base/out_of_memory.h"
#include "common/base/status_macros.h"
#include "common/job/round_mode.h"
#include "server/job/job_shard.h"

namespace gradwire {

absl::StatusOr<std::vector<journal::Record>> JobShard::CopyBucket(uint32_t index) {
  BucketState& bucket = *buckets_[index];
  absl::MutexLock lock(&bucket.mu);
  for (;;) {
    uint64_t next = 0;
    {
      absl::MutexLock job_lock(&mu_);
      GW_RETURN_IF_ERROR(shut_);
      if (!machine_.initialized()) return absl::FailedPreconditionError("the job has no parameters yet");
      // What is held until its norms are known waits for workers and other shards; its record has not passed the sink.
      next = norms_ != nullptr ? bucket.handed : machine_.NextVersionOf(index);
    }
    // A bucket that has closed is applied by another thread just now; its record may have passed the sink already.
    const auto reached = [&bucket, next]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) {
      return bucket.version >= next || !bucket.failure.ok();
    };
    const bool there = reached();
    bucket.mu.Await(absl::Condition(&reached));
    GW_RETURN_IF_ERROR(bucket.failure);
    if (!there) continue;
    std::vector<journal::Record> records;
    std::vector<journal::Contribution> merged;
    if (IsAsync(job_)) {
      absl::MutexLock job_lock(&mu_);
      for (const PushHistory::Merged& frame : machine_.MergedOf(index)) {
        if (bucket.version - frame.round > journal::kMaxContributionAge) continue;
        merged.push_back({frame.id, "", 0, frame.digest, true, frame.round});
      }
    }
    GW_RETURN_IF_ERROR(CatchBadAlloc("a copy for a standby", [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) {
      records.push_back({journal::RecordType::kState, index, bucket.version, merged,
                         bucket.store->Serialize(bucket.plans, ParameterContent::kShard)});
      uint64_t round = bucket.version - bucket.updates.size();
      if (!IsAsync(job_)) {  // else they are in the state
        for (journal::Record& record : KeptBefore(bucket, round)) records.push_back(std::move(record));
      }
      for (const RetainedUpdate& update : bucket.updates) {
        records.push_back({journal::RecordType::kUpdate, index, round++, update.who, *update.chunks});
      }
      return absl::OkStatus();
    }));
    return records;
  }
}

std::vector<CopyPosition> JobShard::Positions() {
  std::vector<CopyPosition> positions;
  for (uint32_t b = 0; b < buckets_.size(); ++b) {
    journal::Record last{journal::RecordType::kUpdate, b, 0, {}, {}};
    {
      BucketState& bucket = *buckets_[b];
      absl::MutexLock lock(&bucket.mu);
      if (bucket.updates.empty() || replay_->buckets[b].end_round != bucket.version) return {};
      last.round = bucket.version - 1;
      last.contributions = bucket.updates.back().who;
      last.chunks = *bucket.updates.back().chunks;
    }
    positions.push_back({last.round + 1, DigestOf(last)});
  }
  return positions;
}

std::vector<uint64_t> JobShard::SafeVersions() const {
  std::vector<uint64_t> versions;
  for (const auto& bucket : buckets_) {
    absl::MutexLock lock(&bucket->mu);
    versions.push_back(bucket->durable);
  }
  return versions;
}

}  // namespace gradwire

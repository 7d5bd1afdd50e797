// See job_log.h.
#include "server/job/job_log.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/out_of_memory.h"
#include "common/base/status_macros.h"

namespace gradwire {

void JobLog::SetSink(std::unique_ptr<UpdateSink> sink) {
  sink_ = std::move(sink);
  for (const auto& bucket : parts_.buckets) {
    absl::MutexLock lock(&bucket->mu);
    bucket->durable = bucket->version;
  }
}

void JobLog::Stop() {
  if (sink_ != nullptr) sink_->Stop();
}

void JobLog::CutBehind(uint64_t version, uint64_t oldest) {
  if (sink_ == nullptr) return;
  // Of these rounds workers may ask again: for updates, or what became of their frames.
  const uint64_t from = oldest - std::min<uint64_t>(oldest, past_.RoundsBehindSnapshot());
  // What workers that are away may ask of earlier ones is written once more.
  for (const auto& bucket : parts_.buckets) {
    std::vector<journal::Record> records;
    {
      absl::MutexLock lock(&bucket->mu);
      records = past_.RecordsBefore(*bucket, from);
    }
    for (journal::Record& record : records) sink_->Append(std::move(record), [] {});
  }
  sink_->SnapshotTaken(version, from);
}

uint64_t JobLog::Bytes() const { return sink_ == nullptr ? 0 : sink_->status().bytes; }

bool JobLog::WantsSnapshot() const {
  if (sink_ == nullptr) return false;
  const journal::JournalStatus status = sink_->status();
  return status.hole && !status.degraded;
}

absl::Status JobLog::Unsafe() const {
  if (sink_ == nullptr || parts_.job.spec().durability().on_failure() != v1::DISK_FAILURE_CONTINUE) {
    return absl::OkStatus();
  }
  const journal::JournalStatus status = sink_->status();
  if (!status.degraded && !status.hole) return absl::OkStatus();
  return absl::DataLossError(absl::StrFormat("job '%s' went on without its journal, and %s", parts_.job.spec().name(),
                                             status.degraded
                                                 ? absl::StrCat("that cannot be written yet: ", status.reason)
                                                 : std::string("the snapshot that makes up for it is not there yet")));
}

std::vector<uint64_t> JobLog::SafeVersions() const {
  std::vector<uint64_t> versions;
  for (const auto& bucket : parts_.buckets) {
    absl::MutexLock lock(&bucket->mu);
    versions.push_back(bucket->durable);
  }
  return versions;
}

absl::StatusOr<uint64_t> JobLog::VersionUnderWay(const BucketState& bucket) {
  absl::MutexLock lock(&parts_.mu);
  GW_RETURN_IF_ERROR(parts_.shut);
  if (!parts_.rounds->initialized()) return absl::FailedPreconditionError("the job has no parameters yet");
  // What is held until the shards agree waits for workers and other shards; its record has not passed the sink.
  return waits_for_shards_ ? bucket.handed : parts_.rounds->NextVersionOf(bucket.layout->bucket);
}

absl::StatusOr<std::vector<journal::Record>> JobLog::CopyBucket(uint32_t index) {
  BucketState& bucket = *parts_.buckets[index];
  absl::MutexLock lock(&bucket.mu);
  for (;;) {
    GW_ASSIGN_OR_RETURN(const uint64_t next, VersionUnderWay(bucket));
    // A bucket that has closed is applied by another thread just now; its record may have passed the sink already.
    const auto reached = [&bucket, next]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) {
      return bucket.version >= next || !bucket.failure.ok();
    };
    const bool there = reached();
    bucket.mu.Await(absl::Condition(&reached));
    GW_RETURN_IF_ERROR(bucket.failure);
    if (!there) continue;
    std::vector<journal::Record> records;
    GW_RETURN_IF_ERROR(CatchBadAlloc("a copy for a standby", [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) {
      records = past_.CopyOf(bucket);
      return absl::OkStatus();
    }));
    return records;
  }
}

void JobLog::Describe(uint64_t version, uint64_t recovered, v1::JobStatus* job) const {
  v1::DurabilityStatus* status = job->mutable_durability();
  status->set_level(parts_.job.durable() ? parts_.job.spec().durability().level() : v1::DURABILITY_NONE);
  if (sink_ == nullptr) return;
  const journal::JournalStatus journal = sink_->status();
  uint64_t durable = version;
  for (uint32_t b = 0; b < parts_.buckets.size(); ++b) {
    const uint64_t written = b < journal.durable_versions.size() ? journal.durable_versions[b] : 0;
    durable = std::min(durable, std::max(written, recovered));
  }
  status->set_durable_version(durable);
  status->set_degraded(journal.degraded);
  status->set_hole(journal.hole);
  status->set_reason(journal.reason);
  status->set_journal_bytes(journal.bytes);
  status->set_backlog_bytes(journal.backlog_bytes);
  status->set_records(journal.records);
  status->set_syncs(journal.syncs);
  status->set_failures(journal.failures);
  for (const journal::JournalStatus::Follower& follower : journal.followers) {
    v1::FollowerStatus& out = *job->add_followers();
    out.set_follower(follower.name);
    out.set_version(follower.version);
    out.set_in_sync(follower.in_sync);
  }
}

}  // namespace gradwire

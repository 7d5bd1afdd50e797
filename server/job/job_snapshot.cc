// Copying a shard at one version while its rounds go on; see job_shard.h.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/background_work.h"
#include "common/base/out_of_memory.h"
#include "common/base/status_macros.h"
#include "common/job/round_mode.h"
#include "server/job/job_shard.h"

namespace gradwire {

absl::StatusOr<std::shared_ptr<ShardCapture>> JobShard::NewCapture() const {
  auto capture = std::make_shared<ShardCapture>();
  // All memory is there, and written to once, before a round waits for a copy.
  for (const auto& bucket : buckets_) {
    capture->state.buckets.emplace_back().Allocate(job_, *bucket->layout);
    GW_RETURN_IF_ERROR(BackgroundWork::Rest());
  }
  return capture;
}

absl::Status JobShard::Capture(const std::shared_ptr<ShardCapture>& capture, absl::Duration timeout) {
  {
    absl::MutexLock lock(&capture->mu);
    capture->missing = static_cast<uint32_t>(buckets_.size());
  }
  const uint64_t newest = NewestVersion();
  {
    absl::MutexLock lock(&mu_);
    GW_RETURN_IF_ERROR(shut_);
    const bool replaying = replaying_;  // a standby: its machine knows of no round
    if (replaying ? newest == 0 : !machine_.initialized()) {
      return absl::FailedPreconditionError("the job has no parameters yet");
    }
    if (!IsAsync(job_)) capture->state.version = replaying ? newest : machine_.NextBoundary();
  }
  {
    absl::MutexLock lock(&snapshot_mu_);
    if (no_capture_) return absl::CancelledError("the job ends");
    capture_ = capture;
  }
  for (const auto& bucket : buckets_) {
    absl::MutexLock lock(&bucket->mu);
    bucket->capture = capture;
    CaptureBucket(*bucket);
  }
  const absl::Time deadline = absl::Now() + timeout;
  const auto over = [&capture]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(capture->mu) {
    return capture->missing == 0 || !capture->failed.ok();
  };
  const auto something = [&]()
                             ABSL_EXCLUSIVE_LOCKS_REQUIRED(capture->mu) { return over() || !capture->reached.empty(); };
  absl::Status status;
  for (bool done = false; !done;) {
    std::vector<uint32_t> reached;
    {
      absl::MutexLock lock(&capture->mu);
      if (!capture->mu.AwaitWithDeadline(absl::Condition(&something), deadline)) {
        capture->failed = absl::DeadlineExceededError(
            "the round in which it was to be taken did not end, or was not written to the journal, in time");
      }
      done = over();
      status = capture->failed;
      reached.swap(capture->reached);
    }
    if (done) break;
    for (const uint32_t index : reached) {
      absl::MutexLock lock(&buckets_[index]->mu);
      CaptureBucket(*buckets_[index]);
    }
  }
  {
    absl::MutexLock lock(&snapshot_mu_);
    capture_ = nullptr;
  }
  for (const auto& bucket : buckets_) {
    if (status.ok()) break;
    absl::MutexLock lock(&bucket->mu);  // the memory is given back
    bucket->capture = bucket->copied = nullptr;
  }
  GW_RETURN_IF_ERROR(status);
  if (!IsAsync(job_)) return absl::OkStatus();
  std::vector<ShardState::Bucket>& copies = capture->state.buckets;
  capture->state.version = UINT64_MAX;
  for (const auto& copy : copies) capture->state.version = std::min(capture->state.version, copy.plans.version());
  for (auto& copy : copies) copy.ahead = copy.plans.version() - capture->state.version;
  return absl::OkStatus();
}

bool JobShard::CanBeCaptured(const BucketState& bucket) {
  return bucket.capture != nullptr && bucket.version >= bucket.capture->state.version;
}

void JobShard::NoteForCapture(BucketState& bucket) {
  if (!CanBeCaptured(bucket)) return;
  absl::MutexLock lock(&bucket.capture->mu);
  bucket.capture->reached.push_back(bucket.layout->bucket);
}

void JobShard::CaptureBucket(BucketState& bucket) {
  if (!CanBeCaptured(bucket)) return;
  const std::shared_ptr<ShardCapture> capture = std::move(bucket.capture);
  bucket.capture = nullptr;
  absl::Status status = bucket.failure;
  if (status.ok() && !IsAsync(job_) && bucket.version > capture->state.version) {
    status = absl::AbortedError("the round went on before it was taken");
  }
  if (status.ok()) {
    status = CatchBadAlloc("a snapshot", [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) {
      ShardState::Bucket& copy = capture->state.buckets[bucket.layout->bucket];
      copy.plans = bucket.plans;
      bucket.store->Read(copy.Targets());
      return absl::OkStatus();
    });
  }
  if (status.ok() && bucket.durable < bucket.version) {
    // A version whose record may still be lost would come back without the frame that it is known by.
    bucket.copied = capture;
    return;
  }
  absl::MutexLock lock(&capture->mu);
  if (capture->failed.ok()) capture->failed = std::move(status);
  --capture->missing;
}

void JobShard::NoteWrittenForCapture(BucketState& bucket) {
  if (bucket.copied == nullptr) return;
  const std::shared_ptr<ShardCapture> capture = bucket.copied;
  if (bucket.durable < capture->state.buckets[bucket.layout->bucket].plans.version()) return;
  bucket.copied = nullptr;
  absl::MutexLock lock(&capture->mu);
  --capture->missing;
}

void JobShard::CancelCapture() {
  std::shared_ptr<ShardCapture> capture;
  {
    absl::MutexLock lock(&snapshot_mu_);
    no_capture_ = true;
    capture = capture_;
  }
  if (capture == nullptr) return;
  absl::MutexLock lock(&capture->mu);
  if (capture->failed.ok()) capture->failed = absl::CancelledError("the job ends");
}

void JobShard::NoteSnapshot(uint64_t version, const absl::Status& status) {
  absl::MutexLock lock(&snapshot_mu_);
  ++snapshots_;
  snapshot_status_ = status;
  if (status.ok()) snapshot_version_ = version;
}

void JobShard::CutJournal(uint64_t version, uint64_t oldest) {
  // Of these rounds workers may ask again: for updates, or what became of their frames.
  if (sink_ == nullptr) return;
  const uint64_t kept = IsAsync(job_) ? PlansKept(job_) : RetainedUpdates(job_);
  const uint64_t from = oldest - std::min<uint64_t>(oldest, kept);
  // What workers that are away may ask of earlier ones is written once more.
  for (const auto& bucket : buckets_) {
    std::vector<journal::Record> records;
    {
      absl::MutexLock lock(&bucket->mu);
      records = KeptBefore(*bucket, from);
    }
    for (journal::Record& record : records) sink_->Append(std::move(record), [] {});
  }
  sink_->SnapshotTaken(version, from);
}

bool JobShard::WantsSnapshot() const {
  if (sink_ == nullptr) return false;
  const journal::JournalStatus status = sink_->status();
  return status.hole && !status.degraded;
}

absl::Status JobShard::Unsafe() const {
  if (sink_ == nullptr || job_.spec().durability().on_failure() != v1::DISK_FAILURE_CONTINUE) return absl::OkStatus();
  const journal::JournalStatus status = sink_->status();
  if (!status.degraded && !status.hole) return absl::OkStatus();
  return absl::DataLossError(absl::StrFormat("job '%s' went on without its journal, and %s", job_.spec().name(),
                                             status.degraded
                                                 ? absl::StrCat("that cannot be written yet: ", status.reason)
                                                 : std::string("the snapshot that makes up for it is not there yet")));
}

uint64_t JobShard::JournalBytes() const { return sink_ == nullptr ? 0 : sink_->status().bytes; }

}  // namespace gradwire

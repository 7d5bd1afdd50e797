// See snapshots.h.
#include "server/snapshot/snapshots.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "common/base/background_work.h"
#include "common/base/out_of_memory.h"
#include "common/base/status_macros.h"

namespace gradwire {
namespace {

bool IsWanted(const BucketState& bucket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) {
  return bucket.capture != nullptr && bucket.version >= bucket.capture->boundary.value_or(0);
}

// Each bucket was copied at a version of its own: the snapshot is of the oldest, and says how far ahead the others are.
void NoteVersions(ShardState* state) {
  state->version = UINT64_MAX;
  for (const auto& bucket : state->buckets) state->version = std::min(state->version, bucket.plans.version());
  for (auto& bucket : state->buckets) bucket.ahead = bucket.plans.version() - state->version;
}

}  // namespace

absl::StatusOr<std::shared_ptr<ShardCapture>> Snapshots::NewCopy() const {
  auto copy = std::make_shared<ShardCapture>();
  // All memory is there, and written to once, before a round waits for a copy.
  for (const auto& bucket : parts_.buckets) {
    copy->state.buckets.emplace_back().Allocate(parts_.job, *bucket->layout);
    GW_RETURN_IF_ERROR(BackgroundWork::Rest());
  }
  return copy;
}

absl::Status Snapshots::Begin(const std::shared_ptr<ShardCapture>& copy) {
  {
    absl::MutexLock lock(&copy->mu);
    copy->missing = static_cast<uint32_t>(parts_.buckets.size());
  }
  const uint64_t newest = parts_.NewestVersion();
  const bool whole = std::all_of(parts_.buckets.begin(), parts_.buckets.end(), [](const auto& bucket) {
    absl::MutexLock lock(&bucket->mu);
    return bucket->ready;
  });
  {
    absl::MutexLock lock(&parts_.mu);
    GW_RETURN_IF_ERROR(parts_.shut);
    const bool replaying = parts_.replaying;  // a standby: its machine knows of no round
    if (replaying ? newest == 0 : !parts_.rounds->initialized()) {
      return absl::FailedPreconditionError("the job has no parameters yet");
    }
    copy->boundary = parts_.rounds->NextBoundary();
    // With a boundary those that have not come yet are waited for; without one they would be taken as they are.
    if (replaying && !copy->boundary && !whole) {
      return absl::FailedPreconditionError("the primary has not sent all buckets yet");
    }
    if (copy->boundary && replaying) copy->boundary = newest;
    copy->state.version = copy->boundary.value_or(0);
  }
  absl::MutexLock lock(&mu_);
  if (cancelled_) return absl::CancelledError("the job ends");
  copy_ = copy;
  return absl::OkStatus();
}

absl::Status Snapshots::AwaitBuckets(ShardCapture& copy, absl::Time deadline) {
  const auto over = [&copy]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(copy.mu) { return copy.missing == 0 || !copy.failed.ok(); };
  const auto something = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(copy.mu) { return over() || !copy.reached.empty(); };
  for (;;) {
    std::vector<uint32_t> reached;
    {
      absl::MutexLock lock(&copy.mu);
      if (!copy.mu.AwaitWithDeadline(absl::Condition(&something), deadline)) {
        copy.failed = absl::DeadlineExceededError(
            "the round in which it was to be taken did not end, or was not written to the journal, in time");
      }
      if (over()) return copy.failed;
      reached.swap(copy.reached);
    }
    for (const uint32_t index : reached) {
      absl::MutexLock lock(&parts_.buckets[index]->mu);
      CopyIfWanted(*parts_.buckets[index]);
    }
  }
}

absl::Status Snapshots::Gather(const std::shared_ptr<ShardCapture>& copy, absl::Duration timeout) {
  GW_RETURN_IF_ERROR(Begin(copy));
  for (const auto& bucket : parts_.buckets) {
    absl::MutexLock lock(&bucket->mu);
    bucket->capture = copy;
    CopyIfWanted(*bucket);
  }
  const absl::Status status = AwaitBuckets(*copy, absl::Now() + timeout);
  {
    absl::MutexLock lock(&mu_);
    copy_ = nullptr;
  }
  for (const auto& bucket : parts_.buckets) {
    if (status.ok()) break;
    absl::MutexLock lock(&bucket->mu);  // the memory is given back
    bucket->capture = bucket->copied = nullptr;
  }
  GW_RETURN_IF_ERROR(status);
  if (!copy->boundary) NoteVersions(&copy->state);
  return absl::OkStatus();
}

void Snapshots::AfterUpdate(BucketState& bucket) {
  if (!IsWanted(bucket)) return;
  absl::MutexLock lock(&bucket.capture->mu);
  bucket.capture->reached.push_back(bucket.layout->bucket);
}

void Snapshots::CopyIfWanted(BucketState& bucket) {
  if (!IsWanted(bucket)) return;
  const std::shared_ptr<ShardCapture> capture = std::move(bucket.capture);
  bucket.capture = nullptr;
  absl::Status status = bucket.failure;
  if (status.ok() && capture->boundary && bucket.version > *capture->boundary) {
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

void Snapshots::NoteSafe(BucketState& bucket) {
  if (bucket.copied == nullptr) return;
  const std::shared_ptr<ShardCapture> capture = bucket.copied;
  if (bucket.durable < capture->state.buckets[bucket.layout->bucket].plans.version()) return;
  bucket.copied = nullptr;
  absl::MutexLock lock(&capture->mu);
  --capture->missing;
}

void Snapshots::Cancel() {
  std::shared_ptr<ShardCapture> copy;
  {
    absl::MutexLock lock(&mu_);
    cancelled_ = true;
    copy = copy_;
  }
  if (copy == nullptr) return;
  absl::MutexLock lock(&copy->mu);
  if (copy->failed.ok()) copy->failed = absl::CancelledError("the job ends");
}

void Snapshots::NoteTaken(uint64_t version, const absl::Status& status) {
  absl::MutexLock lock(&mu_);
  ++tried_;
  last_ = status;
  if (status.ok()) version_ = version;
}

void Snapshots::Describe(v1::DurabilityStatus* status) {
  absl::MutexLock lock(&mu_);
  status->set_snapshot_version(version_);
  status->set_snapshots(tried_);
  status->set_snapshot_error(std::string(last_.message()));
}

}  // namespace gradwire

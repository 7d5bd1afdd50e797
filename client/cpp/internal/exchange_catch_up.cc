// How an exchange goes on when the shards are rounds ahead: because others did not wait for this worker, or because it
// was away. proto/ROUNDS.md, "Workers that are late, or were away".
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/internal/exchange.h"
#include "client/cpp/internal/start.h"
#include "common/base/status_macros.h"
#include "common/job/round_mode.h"

namespace gradwire::client {
namespace {

// A lag of this many versions, and of one more per round of staleness, may be made good by update frames: shards keep
// the last two, the next one comes.
constexpr uint64_t kFollowedVersions = 3;
constexpr absl::Duration kPause = absl::Milliseconds(100);

}  // namespace

absl::Status Exchange::CatchUp(absl::Time deadline) {
  bool by_updates = work_.ParametersKind() == v1::PULL_UNSPECIFIED;
  for (;;) {
    uint64_t resumed = 0;
    bool asked = false;
    {
      absl::MutexLock lock(&mu_);
      GW_RETURN_IF_ERROR(failed_);
      by_updates = by_updates && !ledger_.AnyGone() && ledger_.next() > 1;
      resumed = resumed_;
      asked = catching_.has_value();  // by a call that could not wait for the answers
      agreeing_ = !asked;
    }
    const absl::StatusOr<uint64_t> version = asked ? 0 : AgreeToCatchUp(links_, 0);
    {
      absl::MutexLock lock(&mu_);
      agreeing_ = false;
    }
    if (version.ok()) {
      if (!asked) AskFor(*version, resumed, &by_updates);
      GW_ASSIGN_OR_RETURN(const bool done, WaitForCaught(&by_updates, deadline));
      if (done) return absl::OkStatus();
      continue;
    }
    // Aborted: rounds went on while one shard after the other was asked.
    if (!FrameLink::Mends(version.status()) && !absl::IsAborted(version.status())) {
      Fail(version.status());
      return version.status();
    }
    // The link of a shard that cannot be reached is being mended, or will be lost.
    absl::MutexLock lock(&mu_);
    const auto changed = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !failed_.ok() || resumed_ != resumed; };
    mu_.AwaitWithDeadline(absl::Condition(&changed), std::min(deadline, absl::Now() + kPause));
    GW_RETURN_IF_ERROR(failed_);
    if (absl::Now() >= deadline)
      return absl::DeadlineExceededError(absl::StrCat("round ", ledger_.next() - 1, ": the shards are ahead, and ",
                                                      version.status().message(),
                                                      ". The round stays open: call again to go on waiting"));
  }
}

void Exchange::AskFor(uint64_t version, uint64_t resumed, bool* by_updates) {
  Catching wanted;
  {
    absl::MutexLock lock(&mu_);
    wanted.resumed = resumed;
    wanted.last = version;
    wanted.first = version;
    wanted.kind = StartKind(*context_.slices.job, context_.slices.pull);
    *by_updates = *by_updates && version <= ledger_.round() + kFollowedVersions + staleness_;
    if (*by_updates) {
      wanted.first = ledger_.round() + 1;
      wanted.kind = v1::PULL_UPDATE;
    }
    wanted.missing = (version + 1 - std::min(wanted.first, version + 1)) * work_.slices();
    wanted.chunks.resize(wanted.missing);
    catching_ = wanted;
  }
  for (uint32_t shard = 0; shard < links_.size(); ++shard) {
    for (uint64_t v = wanted.first; v <= wanted.last; ++v) {
      const absl::Status asked = links_[shard]->RequestPull(wanted.kind, v, 0, layout_.bucket_count(shard));
      if (!asked.ok() && !FrameLink::Mends(asked)) Fail(asked);
    }
  }
}

absl::StatusOr<bool> Exchange::WaitForCaught(bool* by_updates, absl::Time deadline) {
  absl::MutexLock lock(&mu_);
  const auto mended = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return resumed_ != catching_->resumed; };
  const auto over = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return !failed_.ok() || mended() || catching_->gone || catching_->missing == 0;
  };
  const uint64_t version = catching_->last;
  if (!mu_.AwaitWithDeadline(absl::Condition(&over), deadline)) {
    // What was asked for is not asked for again: the next call waits for it.
    return absl::DeadlineExceededError(absl::StrCat(
        "round ", ledger_.next() - 1, ": the shards are ahead, and what this worker needs to go on with version ",
        version, " did not come in time. The round stays open: call again to go on waiting"));
  }
  const bool complete = failed_.ok() && !mended() && catching_->missing == 0;
  absl::Status status = failed_;
  if (complete) {
    writing_replica_ = true;
    mu_.Unlock();
    status = TakeCaught();
    mu_.Lock();
    writing_replica_ = false;
    if (status.ok()) {
      counters_.skipped += version - ledger_.round();
      ledger_.MoveTo(version);
    } else {
      FailLocked(status);
    }
  } else if (catching_->gone) {
    *by_updates = false;
  }
  catching_.reset();
  if (!status.ok()) return status;
  return complete;
}

absl::Status Exchange::TakeCaught() {
  Catching* caught = nullptr;
  bool carried = true;
  {
    absl::MutexLock lock(&mu_);
    caught = &*catching_;  // complete: only this thread touches it
    carried = CarriesValues(*context_.slices.job, ledger_.next() - 1);
  }
  for (uint32_t slice = 0; slice < work_.slices(); ++slice) {
    for (uint64_t v = caught->first; v <= caught->last; ++v) {
      const std::vector<wire::Chunk>& chunks = caught->chunks[(v - caught->first) * work_.slices() + slice];
      absl::Status taken =
          caught->kind == v1::PULL_UPDATE ? work_.Follow(slice, v - 1, chunks) : work_.Load(slice, v, chunks);
      if (!taken.ok()) return LinkOf(slice)->Annotate(taken);
    }
    if (!carried) work_.Keep(slice);
  }
  return absl::OkStatus();
}

void Exchange::NoteCaught(uint32_t shard, PullAnswer answer) {
  Catching& catching = *catching_;
  const std::optional<uint32_t> slice = SliceOf(answer.bucket, shard);
  if (!slice || answer.kind != catching.kind || answer.version < catching.first || answer.version > catching.last)
    return;  // of an earlier attempt
  if (absl::IsOutOfRange(answer.status)) {
    catching.gone = true;
    return;
  }
  if (!answer.status.ok()) return FailLocked(answer.status);
  const size_t index = (answer.version - catching.first) * work_.slices() + *slice;
  if (!catching.chunks[index].empty()) return;
  catching.chunks[index] = std::move(answer.chunks);
  --catching.missing;
}

}  // namespace gradwire::client

// Carrying out what the round machine decided: a round becomes an update frame, a record, a version; see job_shard.h.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/failpoint.h"
#include "common/base/out_of_memory.h"
#include "common/base/status_macros.h"
#include "common/job/round_mode.h"
#include "server/job/job_shard.h"

namespace gradwire {

void JobShard::Run(const RoundActions& actions) {
  for (const Member& member : actions.lost) DropMember(member);
  for (const RoundActions::Close& close : actions.close) {
    // Every bucket of the round is closed, whatever happens to the others.
    const absl::Status closed = CatchBadAlloc("closing a bucket", [&] {
      CloseBucket(close);
      return absl::OkStatus();
    });
    if (closed.ok()) continue;
    absl::MutexLock lock(&buckets_[close.bucket]->mu);
    if (buckets_[close.bucket]->failure.ok()) buckets_[close.bucket]->failure = closed;
  }
  if (actions.opened && *actions.opened == 0) spdlog::info("job {}: round 0 opens", job_.spec().name());
  if (job_.spec().rounds().quorum() == 0 || !environment_.tick_sooner) return;
  bool sooner = false;
  {
    absl::MutexLock lock(&mu_);
    sooner = TickIsSooner();
  }
  if (sooner) environment_.tick_sooner();
}

void JobShard::CloseBucket(const RoundActions::Close& close) {
  if (norms_ != nullptr && close.round > 0) return HoldClosed(close);
  BucketState& bucket = *buckets_[close.bucket];
  UpdateFrame update;
  std::vector<journal::Contribution> who;
  GW_FAILPOINT("round.before_close");
  // The round is closed whatever happens: where memory runs out, the bucket stops and its pullers are told.
  const absl::Status finished = CatchBadAlloc("merging", [&]() -> absl::Status {
    GW_RETURN_IF_ERROR(FinishRound(bucket, close, &update));
    if (sink_ != nullptr) who = WhoTookPart(close);
    return absl::OkStatus();
  });
  PublishClosed(close, update, std::move(who), finished);
}

void JobShard::PublishClosed(const RoundActions::Close& close, const UpdateFrame& update,
                             std::vector<journal::Contribution> who, absl::Status status) {
  BucketState& bucket = *buckets_[close.bucket];
  GW_FAILPOINT("round.before_journal");
  // The disk works on it while this thread applies it.
  if (status.ok() && sink_ != nullptr) {
    {
      absl::MutexLock lock(&bucket.mu);
      bucket.handed = close.round + 1;
    }
    status = CatchBadAlloc("the journal", [&] { return Write(close, update, who); });
  }
  std::vector<Delivery> ready;
  {
    absl::MutexLock lock(&bucket.mu);
    if (status.ok()) {
      status = CatchBadAlloc("the optimizer", [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) {
        return Publish(bucket, update, *bucket.plans.Find(PlanVersionOf(close)), std::move(who));
      });
    }
    if (!status.ok() && bucket.failure.ok()) {
      bucket.failure =
          absl::Status(status.code(), absl::StrFormat("job '%s' round %d bucket %d stopped: %s", job_.spec().name(),
                                                      close.round, close.bucket, std::string(status.message())));
    }
    ready = TakeReady(bucket);
  }
  if (!status.ok())
    spdlog::error("job {} round {} bucket {}: {}", job_.spec().name(), close.round, close.bucket, status.ToString());
  Deliver(std::move(ready));
}

std::vector<journal::Contribution> JobShard::WhoTookPart(const RoundActions::Close& close) const {
  std::vector<journal::Contribution> who;
  absl::MutexLock lock(&mu_);
  for (const auto& [id, contribution] : close.contributions) {
    const Member* member = machine_.membership().Get(id);
    who.push_back({id, member == nullptr ? "" : member->worker, member == nullptr ? 0 : member->incarnation,
                   contribution.digest, contribution.included, contribution.round});
  }
  return who;
}

absl::Status JobShard::Write(const RoundActions::Close& close, const UpdateFrame& update,
                             const std::vector<journal::Contribution>& who) {
  sink_->Append({journal::RecordType::kUpdate, close.bucket, close.round, who, update.chunks, update.mean},
                [this, bucket = close.bucket, version = close.round + 1] { NoteWritten(bucket, version); });
  return absl::OkStatus();
}

void JobShard::NoteWritten(uint32_t index, uint64_t version) {
  GW_FAILPOINT("version.before_visible");
  BucketState& bucket = *buckets_[index];
  std::vector<Delivery> ready;
  {
    absl::MutexLock lock(&bucket.mu);
    bucket.durable = std::max(bucket.durable, version);
    NoteWrittenForCapture(bucket);
    ready = TakeReady(bucket);
  }
  GW_FAILPOINT("version.after_visible");
  Deliver(std::move(ready));
}

absl::Status JobShard::FinishRound(BucketState& bucket, const RoundActions::Close& close, UpdateFrame* update) {
  absl::MutexLock lock(&bucket.mu);
  // Another thread may still be finishing the round before: where several are open, or one closed without frames.
  auto reached = [&bucket, &close]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) {
    return bucket.version >= close.round || !bucket.failure.ok();
  };
  bucket.mu.Await(absl::Condition(&reached));
  GW_RETURN_IF_ERROR(bucket.failure);
  OpenRound* const open = bucket.Find(close.round);
  if (open == nullptr || bucket.version != close.round) {
    return absl::InternalError(absl::StrFormat("round %d closes at version %d", close.round, bucket.version));
  }
  // Those of asynchronous rounds hold nothing of the accumulator.
  while (!IsAsync(job_) && !open->partial.empty()) AbandonPartial(bucket, *open, open->partial.begin()->first);
  GW_RETURN_IF_ERROR(bucket.failure);  // one of them may have spoiled the accumulator
  if (open->committed != close.contributors) {
    return absl::InternalError(absl::StrFormat("round %d closes with %d frames, but %d are merged into it", close.round,
                                               close.contributors, open->committed));
  }
  if (open->learning_rates.empty()) open->learning_rates.resize(job_.spec().optimizer().groups_size());
  const RoundPlan& plan = *bucket.plans.Find(PlanVersionOf(close));
  if (open->replacement) {
    *update = FinishReplacement(bucket, plan, *open);
  } else {
    GW_ASSIGN_OR_RETURN(*update, open->accumulator->Finish(IdentityOf(bucket, *open), close.contributors));
  }
  return bucket.store->Compress(plan, update);
}

FrameIdentity JobShard::IdentityOf(const BucketState& bucket, const OpenRound& open) const {
  FrameIdentity id;
  id.shard = static_cast<uint16_t>(shard_index_);
  id.bucket = bucket.layout->bucket;
  id.round = bucket.version;
  id.learning_rates = open.learning_rates;
  id.nonfinite_rounds = bucket.plans.nonfinite_rounds();
  return id;
}

uint64_t JobShard::PlanVersionOf(const RoundActions::Close& close) const {
  return IsAsync(job_) ? close.contributions.begin()->second.round : PlanVersion(job_, close.round);
}

absl::Status JobShard::Publish(BucketState& bucket, const UpdateFrame& update, const RoundPlan& plan,
                               std::vector<journal::Contribution> who) {
  CaptureBucket(bucket);
  GW_RETURN_IF_ERROR(bucket.store->Apply(update, plan));
  deferred_elements_ += update.stats.deferred;
  update_elements_ += update.stats.elements;
  bucket.traffic = update.stats.traffic;
  MemoryAccount::Share share;
  OpenRound* const made_by = IsAsync(job_) ? nullptr : bucket.Find(bucket.version);
  if (made_by != nullptr && made_by->replacement) share = std::move(made_by->replacement->share);
  ++bucket.version;
  bucket.plans.Push(update.next, update.skipped || update.replaces);
  if (!replaying_) OpenNextRounds(bucket);  // else EndReplay does, once
  bucket.serialized = nullptr;
  if (!IsAsync(job_)) {  // else nobody pulls updates
    Retain(bucket, bucket.version,
           {std::make_shared<const std::vector<Bytes>>(update.chunks), bucket.IsOwed(update.skipped, update.replaces),
            update.skipped, std::move(who), std::move(share)});
  }
  NoteForCapture(bucket);
  return absl::OkStatus();
}

void JobShard::Retain(BucketState& bucket, uint64_t version, RetainedUpdate update) {
  bucket.updates.push_back(std::move(update));
  if (bucket.updates.size() <= RetainedUpdates(job_)) return;
  RetainedUpdate oldest = std::move(bucket.updates.front());
  bucket.updates.pop_front();
  if (oldest.is_owed) bucket.owed[version - RetainedUpdates(job_)] = std::move(oldest.chunks);
  LimitOwed(bucket);
}

void JobShard::LimitOwed(BucketState& bucket) {
  if (bucket.owed.empty()) return;
  absl::MutexLock lock(&mu_);
  const uint32_t b = bucket.layout->bucket;
  std::erase_if(bucket.owed, [&](const auto& owed)
                                 ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !machine_.MayAskFor(b, owed.first - 1); });
  while (bucket.owed.size() > OwedUpdates(job_)) {
    bucket.owed_from = bucket.owed.begin()->first + 1;
    bucket.owed.erase(bucket.owed.begin());
  }
}

}  // namespace gradwire

// See apply.h.
#include "server/stages/apply.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/out_of_memory.h"
#include "common/base/status_macros.h"

namespace gradwire {

void Apply::Pass(ClosedBucket&& closed) {
  BucketState& bucket = *closed.bucket;
  {
    absl::MutexLock lock(&bucket.mu);
    if (closed.status.ok()) {
      closed.status = CatchBadAlloc("the optimizer", [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) {
        return ApplyTo(bucket, closed.update, *bucket.plans.Find(closed.plan_version), std::move(closed.who));
      });
    }
    if (!closed.status.ok() && bucket.failure.ok()) {
      bucket.failure =
          absl::Status(closed.status.code(),
                       absl::StrFormat("job '%s' round %d bucket %d stopped: %s", parts_.job.spec().name(),
                                       closed.close.round, closed.close.bucket, std::string(closed.status.message())));
    }
    closed.answers = desk_.TakeReady(bucket);
  }
  next_.Pass(std::move(closed));
}

absl::Status Apply::ApplyTo(BucketState& bucket, const UpdateFrame& update, const RoundPlan& plan,
                            std::vector<journal::Contribution> who) {
  snapshots_.BeforeUpdate(bucket);
  bucket.serialized = nullptr;  // before: else the store would go on in a copy, for this borrows its arrays
  GW_RETURN_IF_ERROR(bucket.store->Apply(update, plan));
  parts_.traffic.NoteUpdate(update.stats);
  bucket.traffic = update.stats.traffic;
  ++bucket.version;
  bucket.plans.Push(update.next, update.skipped || update.replaces);
  past_.Keep(bucket, update, std::move(who));
  if (!parts_.replaying) flow_.OpenNext(bucket);  // else recovery does, once
  snapshots_.AfterUpdate(bucket);
  return absl::OkStatus();
}

}  // namespace gradwire

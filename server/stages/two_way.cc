// See two_way.h.
#include "server/stages/two_way.h"

#include <utility>

#include "common/base/out_of_memory.h"

namespace gradwire {

void TwoWay::Pass(ClosedBucket&& closed) {
  if (closed.status.ok()) {
    closed.status = CatchBadAlloc("merging", [&closed]() -> absl::Status {
      BucketState& bucket = *closed.bucket;
      absl::MutexLock lock(&bucket.mu);
      return bucket.store->Compress(*bucket.plans.Find(closed.plan_version), &closed.update);
    });
  }
  next_.Pass(std::move(closed));
}

}  // namespace gradwire

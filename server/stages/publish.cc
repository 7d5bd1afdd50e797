// See publish.h.
#include "server/stages/publish.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "common/base/failpoint.h"

namespace gradwire {

void Publish::Pass(ClosedBucket&& closed) {
  if (!closed.status.ok()) {
    spdlog::error("job {} round {} bucket {}: {}", parts_.job.spec().name(), closed.close.round, closed.close.bucket,
                  closed.status.ToString());
  }
  desk_.Deliver(std::move(closed.answers));
}

void Publish::NoteSafe(uint32_t index, uint64_t version) {
  GW_FAILPOINT("version.before_visible");
  parts_.trace.Note({.stage = v1::TRACE_SAFE, .round = version - 1, .bucket = index});
  BucketState& bucket = *parts_.buckets[index];
  std::vector<Delivery> ready;
  {
    absl::MutexLock lock(&bucket.mu);
    bucket.durable = std::max(bucket.durable, version);
    snapshots_.NoteSafe(bucket);
    ready = desk_.TakeReady(bucket);
  }
  GW_FAILPOINT("version.after_visible");
  desk_.Deliver(std::move(ready));
}

void Publish::StopAll(uint64_t round, const absl::Status& why) {
  spdlog::error("job {} round {}: {}", parts_.job.spec().name(), round, why.ToString());
  for (const auto& bucket : parts_.buckets) {
    std::vector<Delivery> ready;
    {
      absl::MutexLock lock(&bucket->mu);
      if (bucket->failure.ok()) {
        bucket->failure =
            absl::Status(why.code(), absl::StrFormat("job '%s' stopped in round %d: %s", parts_.job.spec().name(),
                                                     round, std::string(why.message())));
      }
      ready = desk_.TakeReady(*bucket);
    }
    desk_.Deliver(std::move(ready));
  }
}

}  // namespace gradwire

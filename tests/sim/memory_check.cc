// See memory_check.h.
#include "tests/sim/memory_check.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/rounds/push_history.h"

namespace gradwire::sim {

void CheckMemory(World* world, JobShard& shard, uint64_t frame_limit_bytes, const std::string& who) {
  const MemoryUse use = shard.MeasureMemory();
  const MemoryBound& bound = shard.memory();
  const uint64_t workers = shard.job().spec().max_workers();
  const struct {
    const char* what;
    uint64_t held;
    uint64_t limit;
  } kParts[] = {
      {"bytes of frames in flight", use.in_flight, bound.in_flight + frame_limit_bytes},
      {"bytes of accumulators", use.accumulators, bound.accumulators},
      {"bytes of update frames", use.updates, bound.updates},
      {"bytes of serialized parameters", use.serialized, bound.serialized},
      {"retained updates of a bucket", use.retained_updates, RetainedUpdates(shard.job())},
      {"owed updates of a bucket", use.owed_updates, OwedUpdates(shard.job())},
      {"waiting pulls of a worker", use.waiters, MaxWaitersPerMember(shard.job())},
      {"histories", use.histories, workers + std::max<uint64_t>(PushHistory::kDeparted, workers)},
      {"counted workers", use.totals, workers},
  };
  for (const auto& part : kParts)
    if (part.held > part.limit)
      world->Violate(absl::StrCat(who, " holds ", part.held, " ", part.what, ", the bound is ", part.limit));
  if (use.in_flight != use.unfinished)
    world->Violate(absl::StrCat(who, " counts ", use.in_flight, " bytes in flight, and holds ", use.unfinished));
  if (use.partial_frames > 0) world->Count(Event::kFramePartlyThere);
}

}  // namespace gradwire::sim

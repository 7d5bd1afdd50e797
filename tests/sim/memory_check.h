// What servers and workers hold, against the bounds that they promise.
#pragma once

#include <string>

#include "server/job/job_shard.h"
#include "tests/sim/world.h"

namespace gradwire::sim {

// After an event, when nothing of the shard runs. Violates the world's invariants, naming `who`, where more is held
// than JobShard::memory() and the limits of the parts allow, or where the count of bytes in flight is wrong.
void CheckMemory(World* world, JobShard& shard, uint64_t frame_limit_bytes, const std::string& who);

}  // namespace gradwire::sim

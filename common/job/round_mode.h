// Which rounds a job has, where code differs by it. What they promise: proto/ROUNDS.md.
#pragma once

#include "common/job/job.h"

namespace gradwire {

// Every frame makes a version of its bucket by itself; a frame's round is the version that it was computed on.
inline bool IsAsync(const Job& job) { return job.spec().rounds().mode() == v1::ROUNDS_ASYNC; }

// How many versions the shards of a job may be apart while nothing is lost, unless its rounds are asynchronous: workers
// begin a round when every shard has made the versions that it is computed on.
inline uint64_t MostApart(const Job& job) { return 1 + job.spec().rounds().staleness(); }

}  // namespace gradwire

// How many elements of a table lie one behind the other on a shard, where its codec leaves that open ("zen" without
// run=). Hot rows of an embedding are neighbours: short runs spread them over the shards. Long ones are less work, and
// fewer to remember. It does not depend on the number of shards: a job may be restored to another one.
#pragma once

#include <cstdint>

#include "gradwire/v1/job.pb.h"

namespace gradwire {

// A power of two, 256 to 4096. `elements`: of all tensors.
uint32_t TableRun(uint64_t elements);
// The spec with that run in every zen that leaves it open; what is no codec stays as it is.
v1::JobSpec WithTableRuns(v1::JobSpec spec);

}  // namespace gradwire

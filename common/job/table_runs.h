// How many elements of a table lie one behind the other on a shard, where its codec leaves that open ("zen" without
// run=). Hot rows of an embedding are neighbours: short runs spread them over many shards. Long ones are less work, and
// fewer to remember: each takes 24 bytes in every process of the job.
#pragma once

#include <cstdint>

namespace gradwire {

// A power of two, 16 to 4096. `elements`: of all tables.
uint32_t TableRun(uint64_t elements, uint32_t shards);

}  // namespace gradwire

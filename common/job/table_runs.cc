// See table_runs.h.
#include "common/job/table_runs.h"

#include <algorithm>
#include <bit>

namespace gradwire {
namespace {

constexpr uint64_t kLeast = 16;
constexpr uint64_t kMost = 4096;
// Few shards have many of a batch's rows each, so chance leaves them alike: runs are of 1024 with 2, the shortest with
// 16.
constexpr uint64_t kSpread = 4096;
// What runs may take in every process: rows are looked up in them, so they should lie in a cache, and with more shards
// each has less of a batch, which has to be spread more finely.
constexpr uint64_t kRunBytes = 24;
constexpr uint64_t kBytesPerShard = 2u << 20;

}  // namespace

uint32_t TableRun(uint64_t elements, uint32_t shards) {
  if (shards <= 1) return kMost;
  const uint64_t spread = std::bit_floor(std::max<uint64_t>(1, kSpread / (uint64_t{shards} * shards)));
  uint64_t run = std::clamp(spread, kLeast, kMost);
  while (run < kMost && elements / run > kBytesPerShard * shards / kRunBytes) run *= 2;
  return static_cast<uint32_t>(run);
}

}  // namespace gradwire

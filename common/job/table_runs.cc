// See table_runs.h.
#include "common/job/table_runs.h"

#include <algorithm>
#include <bit>

namespace gradwire {
namespace {

constexpr uint64_t kLeast = 16;
constexpr uint64_t kMost = 4096;
// So long that encoding, merging and decoding rows take hardly longer than with any longer ones.
constexpr uint64_t kLongEnough = 256;
// Few shards have many of a batch's rows each, so chance leaves them alike: runs are kLongEnough with 2, the shortest
// with 8.
constexpr uint64_t kSpread = 1024;
// What runs may take in every process.
constexpr uint64_t kRunBytes = 24;
constexpr uint64_t kMostBytes = 64u << 20;

}  // namespace

uint32_t TableRun(uint64_t elements, uint32_t shards) {
  if (shards <= 1) return kMost;
  const uint64_t spread = std::bit_floor(std::max<uint64_t>(1, kSpread / (uint64_t{shards} * shards)));
  uint64_t run = std::clamp(spread, kLeast, kLongEnough);
  while (run < kMost && elements / run > kMostBytes / kRunBytes) run *= 2;
  return static_cast<uint32_t>(run);
}

}  // namespace gradwire

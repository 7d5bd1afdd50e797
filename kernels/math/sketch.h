// The hash of the sketch: which three cells an element is added to. Spec: proto/WIRE.md, "Sketch".
// TAGC (arXiv 2504.05638) and LHC (arXiv 2402.07529) use signed count sketches over blocks; integers and a known index
// need no signs, and hashing each element on its own spreads clustered non-zeros evenly.
#pragma once

#include "kernels/math/math.h"

namespace gradwire::kernels {

struct SketchCells {
  uint32_t group;
  uint32_t cell[3];  // within the group; distinct, one in each third
};

// Key of one (job, round, bucket, shard).
GW_HD uint64_t SketchSalt(uint64_t seed, uint64_t round, uint32_t bucket, uint32_t shard) {
  return Mix(Mix(seed ^ Mix(round)) ^ Mix((static_cast<uint64_t>(bucket) << 32) | shard));
}

GW_HD uint64_t SketchHash(uint32_t position, uint64_t salt) { return Mix(salt ^ position); }

GW_HD uint32_t SketchGroup(uint64_t hash, uint32_t groups) {
  return static_cast<uint32_t>(((hash >> 32) * groups) >> 32);
}

// `third` = cells per group / 3, at most 2^20. 21 hash bits pick the cell of each third.
GW_HD SketchCells CellsOf(uint32_t position, uint64_t salt, uint32_t groups, uint32_t third) {
  const uint64_t hash = SketchHash(position, salt);
  const uint64_t bits = Mix(hash);
  SketchCells out;
  out.group = SketchGroup(hash, groups);
  out.cell[0] = static_cast<uint32_t>(((bits & 0x1FFFFF) * third) >> 21);
  out.cell[1] = third + static_cast<uint32_t>((((bits >> 21) & 0x1FFFFF) * third) >> 21);
  out.cell[2] = 2 * third + static_cast<uint32_t>((((bits >> 42) & 0x1FFFFF) * third) >> 21);
  return out;
}

}  // namespace gradwire::kernels

// See agreed.h.
#include "common/codec/sparse/agreed.h"

#include "common/base/hash.h"
#include "common/codec/run_pieces.h"

namespace gradwire::sparse {

void AgreedPositions(const Job& job, const BucketLayout& layout, uint64_t round, double density, uint64_t begin,
                     uint64_t count, std::vector<uint32_t>* out) {
  const uint64_t keep_below = static_cast<uint64_t>(density * 4294967296.0);
  ForEachRunPiece(layout, begin, count, [&](size_t run, uint64_t offset, uint64_t n, uint64_t position) {
    const Run& r = layout.runs[run];
    const uint64_t salt =
        HashCombine(HashCombine(job.spec().seed(), round), HashString(job.tensors()[r.tensor].name, r.offset));
    for (uint64_t i = 0; i < n; ++i) {
      uint32_t h = static_cast<uint32_t>(offset + i) * 0x9E3779B9u ^ static_cast<uint32_t>(salt);
      h = (h ^ (h >> 16)) * 0x7FEB352Du;
      h = (h ^ (h >> 15) ^ static_cast<uint32_t>(salt >> 32)) * 0x846CA68Bu;
      h ^= h >> 16;
      if (h < keep_below) out->push_back(static_cast<uint32_t>(position + i));
    }
  });
}

}  // namespace gradwire::sparse

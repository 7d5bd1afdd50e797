// See agreed.h.
#include "common/codec/sparse/agreed.h"

#include "common/codec/bits/draw.h"
#include "common/codec/bits/salts.h"
#include "common/codec/frame/run_pieces.h"

namespace gradwire::sparse {

void AgreedPositions(const Job& job, const BucketLayout& layout, uint64_t round, double density, uint64_t begin,
                     uint64_t count, std::vector<uint32_t>* out) {
  const uint64_t keep_below = static_cast<uint64_t>(density * 4294967296.0);
  ForEachRunPiece(layout, begin, count, [&](size_t run, uint64_t offset, uint64_t n, uint64_t position) {
    const Run& r = layout.runs[run];
    const uint64_t salt = SharedSalt(job, r, round);
    for (uint64_t i = 0; i < n; ++i) {
      if (DrawBits(salt, offset + i) < keep_below) out->push_back(static_cast<uint32_t>(position + i));
    }
  });
}

}  // namespace gradwire::sparse

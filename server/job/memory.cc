// Memory bounds of a job; see memory.h.
#include "server/job/memory.h"

#include <algorithm>

#include "absl/strings/str_format.h"

namespace gradwire {
namespace {

constexpr uint64_t kFrameOverheadBytes = 4096;  // headers, learning rates, exponents of small buckets
// Partial frames of this many workers are held at once; more are refused and come again in the next round.
constexpr uint64_t kFramesInFlight = 8;

uint64_t UpdateBound(const Codec& codec, uint64_t elements) {
  const uint64_t dense = elements * 5;  // float32, or an index and a packed value per element
  if (!codec.sparse()) return dense + kFrameOverheadBytes;
  return std::min<uint64_t>(dense, codec.accumulator_bytes()) + kFrameOverheadBytes;
}

}  // namespace

std::string MemoryBound::ToString() const {
  return absl::StrFormat(
      "%d bytes (parameters %d, moments %d, accumulators %d, retained updates %d, serialized parameters %d, frames in "
      "flight %d)",
      total(), parameters, moments, accumulators, updates, serialized, in_flight);
}

MemoryBound BoundMemory(const Job& job, const Layout& layout, uint32_t shard,
                        const std::vector<std::unique_ptr<Codec>>& codecs, uint64_t frame_limit_bytes) {
  MemoryBound bound;
  uint64_t largest_frame = 0;
  for (uint32_t b = 0; b < layout.bucket_count(); ++b) {
    const uint64_t elements = layout.at(b, shard).elements;
    if (job.keeps_parameters()) {
      bound.parameters += elements * sizeof(float);
      bound.moments += elements * sizeof(float) * static_cast<uint64_t>(job.moments());
      bound.serialized += elements * sizeof(float) * static_cast<uint64_t>(1 + job.moments());
    }
    bound.serialized += kFrameOverheadBytes;
    if (b < codecs.size()) {
      bound.accumulators += 2 * codecs[b]->accumulator_bytes();
      bound.updates += 2 * UpdateBound(*codecs[b], elements);
    }
    largest_frame = std::max(largest_frame, elements * 5 + kFrameOverheadBytes);
  }
  const uint64_t frames = std::min<uint64_t>(kFramesInFlight, std::max<uint32_t>(1, job.spec().max_workers()));
  bound.in_flight = frames * std::min(largest_frame, frame_limit_bytes);
  return bound;
}

}  // namespace gradwire

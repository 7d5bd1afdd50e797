// See chunks.h.
#include "tests/sim/chunks.h"

#include <algorithm>
#include <cstdint>

#include "common/wire/frame.h"

namespace gradwire::sim {
namespace {

// Segments of these may be cut anywhere, as encoders do where they do not fit.
bool MayBeCut(wire::SegmentType type) {
  return type == wire::SegmentType::kDenseF32 || type == wire::SegmentType::kDenseInt ||
         type == wire::SegmentType::kCells;
}

}  // namespace

std::vector<Bytes> Rechunk(const std::vector<Bytes>& frame, size_t chunk_bytes) {
  if (chunk_bytes == 0) return frame;
  const std::vector<wire::Chunk> chunks = wire::ParseFrame(frame).value();  // the encoder's own
  wire::FrameWriter writer(chunks[0].header, chunk_bytes);
  for (const wire::Chunk& chunk : chunks)
    for (const wire::Segment& segment : chunk.segments) {
      const uint32_t width = segment.count == 0 ? 0 : segment.bytes / segment.count;
      const uint32_t step = MayBeCut(segment.type) ? static_cast<uint32_t>(writer.max_payload()) / width & ~7u
                                                   : std::max(segment.count, 1u);
      for (uint32_t first = 0; first < std::max(segment.count, 1u); first += step) {
        const uint32_t count = std::min(step, segment.count - first);
        const uint32_t bytes = count == segment.count ? segment.bytes : count * width;
        writer.Add({segment.type, segment.param, segment.begin + first, count, bytes}, segment.data + first * width);
      }
    }
  return writer.Finish();
}

std::vector<Bytes> BytesOf(const std::vector<wire::Chunk>& chunks) {
  std::vector<Bytes> bytes;
  for (const wire::Chunk& chunk : chunks) bytes.push_back(chunk.bytes);
  return bytes;
}

}  // namespace gradwire::sim

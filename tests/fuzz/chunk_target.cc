// wire::ParseChunk, ParseReceived and ParseHeader: one verdict however a chunk arrived, and one way to write it.
#include <algorithm>

#include "common/wire/frame.h"
#include "tests/fuzz/buckets.h"
#include "tests/fuzz/chunk_input.h"
#include "tests/fuzz/targets.h"

namespace gradwire::fuzz {
namespace {

void RequireSame(const absl::StatusOr<wire::Chunk>& whole, const absl::StatusOr<wire::Chunk>& received) {
  Require(whole.status() == received.status(), "a chunk in slices gets the verdict of the same chunk in one piece");
  if (!whole.ok()) return;
  Require(whole->segments.size() == received->segments.size(), "as many segments");
  for (size_t i = 0; i < whole->segments.size(); ++i) {
    const wire::Segment& a = whole->segments[i];
    const wire::Segment& b = received->segments[i];
    Require(a.type == b.type && a.param == b.param && a.begin == b.begin && a.count == b.count, "the same segments");
    Require(std::ranges::equal(a.payload(), b.payload()), "the same payloads");
  }
}

// What was parsed and written again has the same bytes: nothing in a chunk goes unchecked.
void RequireCanonical(const wire::Chunk& chunk) {
  if (chunk.header.chunk != 0 || (chunk.header.flags & wire::kLastChunk) == 0) return;  // a writer begins at 0
  wire::FrameWriter writer(chunk.header, wire::kMaxChunkBytes);
  for (const wire::Segment& s : chunk.segments) writer.Add(s, s.data);
  const std::vector<Bytes> written = writer.Finish();
  Require(written.size() == 1 && std::ranges::equal(written[0].span(), chunk.bytes.span()),
          "a chunk that is read and written again keeps its bytes");
}

}  // namespace

void RunChunk(Input bytes) {
  const ChunkInput input = ParseInput(bytes);
  for (const std::vector<uint8_t>& chunk : input.chunks) {
    std::vector<uint8_t> exact = chunk;
    exact.shrink_to_fit();
    const absl::StatusOr<wire::Chunk> whole = wire::ParseChunk(Bytes::FromVector(std::move(exact)));
    const std::vector<Bytes> slices = Slices(chunk, input.slicing);
    std::vector<uint8_t> scratch;
    RequireSame(whole, wire::ParseReceived(slices, &scratch));
    Require(!whole.ok() || wire::ParseHeader(chunk).ok(), "the header of a good chunk is good");
    if (whole.ok()) RequireCanonical(*whole);
  }
}

Seeds ChunkSeeds() {
  Seeds seeds;
  for (const Bucket& bucket : Buckets()) {
    for (const Round& round : bucket.rounds) {
      seeds.push_back(MakeInput(0, 0, static_cast<uint8_t>(seeds.size()), round.frames[0].chunks));
      seeds.push_back(MakeInput(0, 0, static_cast<uint8_t>(seeds.size()), round.update));
    }
  }
  return seeds;
}

}  // namespace gradwire::fuzz

// See chunk_input.h. Offsets are those of proto/WIRE.md.
#include "tests/fuzz/chunk_input.h"

#include <algorithm>
#include <cstring>
#include <random>

#include "common/base/crc32c.h"
#include "common/base/hash.h"
#include "common/wire/frame.h"

namespace gradwire::fuzz {
namespace {

using wire::kHeaderBytes;
using wire::kSegmentHeaderBytes;

template <typename T>
void Store(uint8_t* p, T value) {
  std::memcpy(p, &value, sizeof(value));
}

uint32_t LoadU32(const uint8_t* p) {
  uint32_t value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

size_t Padded(size_t bytes) { return (bytes + 7) & ~size_t{7}; }

// Where the segments of a repaired chunk begin; the last entry is the end.
std::vector<size_t> SegmentBounds(const std::vector<uint8_t>& chunk) {
  std::vector<size_t> bounds = {kHeaderBytes};
  while (bounds.back() + kSegmentHeaderBytes <= chunk.size()) {
    const size_t at = bounds.back();
    bounds.push_back(at + kSegmentHeaderBytes + Padded(LoadU32(chunk.data() + at + 4)));
  }
  return bounds;
}

// A value at which something may change.
uint64_t Interesting(std::mt19937& random) {
  static constexpr uint64_t kValues[] = {0,
                                         1,
                                         2,
                                         3,
                                         4,
                                         5,
                                         31,
                                         32,
                                         63,
                                         64,
                                         65,
                                         128,
                                         255,
                                         299,
                                         300,
                                         301,
                                         4096,
                                         65535,
                                         65536,
                                         0x7FFFFFFF,
                                         0x80000000,
                                         0xFFFFFFFF,
                                         0x100000000,
                                         0x7FFFFFFFFFFFFFFF,
                                         0xFFFFFFFFFFFFFFFF};
  return kValues[random() % std::size(kValues)];
}

void SetSegmentField(uint8_t* segment, std::mt19937& random) {
  switch (random() % 5) {
    case 0:
      segment[0] = static_cast<uint8_t>(1 + random() % 23);
      break;
    case 1:
      segment[1] = static_cast<uint8_t>(Interesting(random));
      break;
    case 2:
      Store(segment + 4, static_cast<uint32_t>(Interesting(random)));
      break;
    case 3:
      Store(segment + 8, Interesting(random));
      break;
    default:
      Store(segment + 16, static_cast<uint32_t>(Interesting(random)));
      break;
  }
}

// Repeats, removes, moves or changes a segment of a repaired chunk.
void MutateSegments(std::vector<uint8_t>* chunk, std::mt19937& random) {
  const std::vector<size_t> bounds = SegmentBounds(*chunk);
  if (bounds.size() < 2) return;
  const size_t i = random() % (bounds.size() - 1);
  const std::vector<uint8_t> segment(chunk->begin() + static_cast<ptrdiff_t>(bounds[i]),
                                     chunk->begin() + static_cast<ptrdiff_t>(bounds[i + 1]));
  const uint32_t what = random() % 4;
  if (what == 0) return SetSegmentField(chunk->data() + bounds[i], random);
  const size_t to = bounds[random() % bounds.size()];
  if (what != 1) chunk->insert(chunk->begin() + static_cast<ptrdiff_t>(to), segment.begin(), segment.end());
  if (what == 2) return;
  const size_t at = what == 3 && to <= bounds[i] ? bounds[i] + segment.size() : bounds[i];
  chunk->erase(chunk->begin() + static_cast<ptrdiff_t>(at),
               chunk->begin() + static_cast<ptrdiff_t>(at + segment.size()));
}

void MutateChunkList(ChunkInput* input, std::mt19937& random) {
  if (input->chunks.empty()) return;
  const size_t i = random() % input->chunks.size();
  if (random() % 2 == 0) {
    input->chunks.insert(input->chunks.begin() + static_cast<ptrdiff_t>(random() % (input->chunks.size() + 1)),
                         std::vector<uint8_t>(input->chunks[i]));
  } else if (input->chunks.size() > 1) {
    std::swap(input->chunks[i], input->chunks[random() % input->chunks.size()]);
  }
}

// Splits the chunks' segments anew: one more chunk, if there are segments to cut between.
void CutChunk(ChunkInput* input, std::mt19937& random) {
  if (input->chunks.empty()) return;
  const size_t i = random() % input->chunks.size();
  std::vector<uint8_t>& chunk = input->chunks[i];
  const std::vector<size_t> bounds = SegmentBounds(chunk);
  if (bounds.size() < 3) return;
  const auto cut = static_cast<ptrdiff_t>(bounds[1 + random() % (bounds.size() - 2)]);
  std::vector<uint8_t> second(chunk.begin(), chunk.begin() + kHeaderBytes);
  second.insert(second.end(), chunk.begin() + cut, chunk.end());
  chunk.resize(static_cast<size_t>(cut));
  input->chunks.insert(input->chunks.begin() + static_cast<ptrdiff_t>(i + 1), std::move(second));
}

void Renumber(ChunkInput* input) {
  for (size_t i = 0; i < input->chunks.size(); ++i) {
    uint8_t* p = input->chunks[i].data();
    p[6] = static_cast<uint8_t>((p[6] & wire::kAbstain) | (i + 1 == input->chunks.size() ? wire::kLastChunk : 0));
    Store(p + 24, static_cast<uint32_t>(i));
  }
}

}  // namespace

ChunkInput ParseInput(Input input) {
  Reader reader(input);
  ChunkInput out;
  out.bucket = reader.Take<uint8_t>();
  out.round = reader.Take<uint8_t>();
  out.slicing = reader.Take<uint8_t>();
  while (!reader.rest().empty()) {
    const uint32_t bytes = reader.Take<uint32_t>();
    const Input chunk = reader.rest().first(std::min<size_t>(bytes, reader.rest().size()));
    out.chunks.emplace_back(chunk.begin(), chunk.end());
    reader = Reader(reader.rest().subspan(chunk.size()));
  }
  return out;
}

std::vector<uint8_t> ToBytes(const ChunkInput& input) {
  std::vector<uint8_t> out = {input.bucket, input.round, input.slicing};
  for (const std::vector<uint8_t>& chunk : input.chunks) {
    for (int i = 0; i < 4; ++i) out.push_back(static_cast<uint8_t>(chunk.size() >> (8 * i)));
    out.insert(out.end(), chunk.begin(), chunk.end());
  }
  return out;
}

std::vector<uint8_t> MakeInput(uint8_t bucket, uint8_t round, uint8_t slicing, std::span<const Bytes> chunks) {
  ChunkInput input{bucket, round, slicing, {}};
  for (const Bytes& chunk : chunks) input.chunks.emplace_back(chunk.data(), chunk.data() + chunk.size());
  return ToBytes(input);
}

std::vector<Bytes> Slices(std::span<const uint8_t> chunk, uint8_t slicing) {
  std::vector<Bytes> slices;
  uint64_t random = slicing;
  size_t at = 0;
  do {
    random = Mix64(random);
    const size_t offset = (random >> 32) % 8;
    const size_t longest = random % 4 == 0 ? 8 : 256;
    const size_t left = chunk.size() - at;
    const size_t bytes = slicing == 0 ? left : std::min<size_t>(left, (random >> 8) % longest);
    std::vector<uint8_t> memory(offset);
    memory.insert(memory.end(), chunk.begin() + static_cast<ptrdiff_t>(at),
                  chunk.begin() + static_cast<ptrdiff_t>(at + bytes));
    memory.shrink_to_fit();
    const Bytes whole = Bytes::FromVector(std::move(memory));
    slices.push_back(whole.Slice(offset, bytes));
    at += bytes;
  } while (at < chunk.size());
  return slices;
}

void Repair(std::vector<uint8_t>* chunk) {
  if (chunk->size() < kHeaderBytes) chunk->resize(kHeaderBytes);
  uint16_t segments = 0;
  size_t at = kHeaderBytes;
  while (at + kSegmentHeaderBytes <= chunk->size() && segments < wire::kMaxSegmentsPerChunk) {
    uint8_t* p = chunk->data() + at;
    const size_t left = (chunk->size() - at - kSegmentHeaderBytes) & ~size_t{7};
    const uint32_t bytes = static_cast<uint32_t>(std::min<size_t>(LoadU32(p + 4), left));
    Store(p + 2, uint16_t{0});
    Store(p + 4, bytes);
    std::memset(p + kSegmentHeaderBytes + bytes, 0, Padded(bytes) - bytes);
    Store(p + 20, Crc32c({p + kSegmentHeaderBytes, bytes}, Crc32c({p, 20})));
    at += kSegmentHeaderBytes + Padded(bytes);
    ++segments;
  }
  chunk->resize(at);
  uint8_t* p = chunk->data();
  Store(p, wire::kMagic);
  p[4] = wire::kVersion;
  p[7] = 0;
  Store(p + 14, segments);
  Store(p + 32, static_cast<uint32_t>(at - kHeaderBytes));
  Store(p + 52, uint64_t{0});
  Store(p + 60, Crc32c({p, 60}));
}

size_t MutateChunks(uint8_t* data, size_t size, size_t max_size, uint32_t seed, MutateBytes mutate_bytes) {
  std::mt19937 random(seed);
  const uint32_t what = random() % 8;
  if (what < 4) size = mutate_bytes(data, size, max_size);
  if (random() % 16 == 0) return size;  // as it came out: the checks before and of checksums
  ChunkInput input = ParseInput({data, size});
  for (std::vector<uint8_t>& chunk : input.chunks) Repair(&chunk);
  if (what == 4) MutateChunkList(&input, random);
  if (what == 5) CutChunk(&input, random);
  if (what > 5 && !input.chunks.empty()) MutateSegments(&input.chunks[random() % input.chunks.size()], random);
  if (random() % 4 != 0) Renumber(&input);
  for (std::vector<uint8_t>& chunk : input.chunks) Repair(&chunk);
  const std::vector<uint8_t> bytes = ToBytes(input);
  if (bytes.size() > max_size) return size;
  std::memcpy(data, bytes.data(), bytes.size());
  return bytes.size();
}

}  // namespace gradwire::fuzz

// Parsing and building frames; the byte layout is specified in proto/WIRE.md.
#include "common/wire/frame.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_format.h"
#include "common/base/crc32c.h"
#include "common/base/little_endian.h"
#include "common/base/status_macros.h"

namespace gradwire::wire {
namespace {

constexpr size_t kCrcOffsetInHeader = 60;
constexpr size_t kCrcOffsetInSegment = 20;

constexpr size_t kBodyBytesOffset = 32;  // in a header
constexpr size_t Padded(size_t n) { return (n + 7) & ~size_t{7}; }

void StoreHeader(const FrameHeader& h, uint8_t* p) {
  std::memset(p, 0, kHeaderBytes);
  Store<uint32_t>(p + 0, kMagic);
  Store<uint8_t>(p + 4, kVersion);
  Store<uint8_t>(p + 5, static_cast<uint8_t>(h.kind));
  Store<uint16_t>(p + 6, h.flags);
  Store<uint32_t>(p + 8, h.bucket);
  Store<uint16_t>(p + 12, h.shard);
  Store<uint16_t>(p + 14, h.segments);
  Store<uint64_t>(p + 16, h.round);
  Store<uint32_t>(p + 24, h.chunk);
  Store<uint32_t>(p + 28, h.shape_digest);
  Store<uint32_t>(p + kBodyBytesOffset, h.body_bytes);
  Store<uint32_t>(p + 36, h.contributors);
  Store<uint64_t>(p + 40, h.incarnation);
  Store<uint32_t>(p + 48, h.plan_digest);
  Store<uint32_t>(p + 52, h.nonfinite_rounds);
  Store<uint32_t>(p + kCrcOffsetInHeader, Crc32c({p, kCrcOffsetInHeader}));
}

absl::StatusOr<FrameHeader> LoadHeader(std::span<const uint8_t> bytes) {
  if (bytes.size() < kHeaderBytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("frame chunk of %d bytes is shorter than its %d-byte header", bytes.size(), kHeaderBytes));
  }
  const uint8_t* p = bytes.data();
  if (Load<uint32_t>(p) != kMagic) {
    return absl::InvalidArgumentError(
        absl::StrFormat("not a frame: magic 0x%08x, expected 0x%08x", Load<uint32_t>(p), kMagic));
  }
  if (p[4] != kVersion) {
    return absl::InvalidArgumentError(
        absl::StrFormat("frame version %d is not supported (this side speaks %d)", p[4], kVersion));
  }
  const uint32_t crc = Crc32c({p, kCrcOffsetInHeader});
  if (crc != Load<uint32_t>(p + kCrcOffsetInHeader)) {
    return absl::DataLossError(absl::StrFormat("frame header fails its CRC-32C (computed 0x%08x, stored 0x%08x)", crc,
                                               Load<uint32_t>(p + kCrcOffsetInHeader)));
  }
  FrameHeader h;
  if (p[5] < 1 || p[5] > 4) return absl::InvalidArgumentError(absl::StrFormat("unknown frame kind %d", p[5]));
  h.kind = static_cast<FrameKind>(p[5]);
  h.flags = Load<uint16_t>(p + 6);
  if (h.flags & ~(kLastChunk | kAbstain | kNonFinite | kReplace | kWithoutBody)) {
    return absl::InvalidArgumentError(absl::StrFormat("unknown frame flags 0x%04x", h.flags));
  }
  if ((h.flags & kWithoutBody) != 0 && h.kind != FrameKind::kUpdate) {
    return absl::InvalidArgumentError("only update frames are without their body");
  }
  h.bucket = Load<uint32_t>(p + 8);
  h.shard = Load<uint16_t>(p + 12);
  h.segments = Load<uint16_t>(p + 14);
  h.round = Load<uint64_t>(p + 16);
  h.chunk = Load<uint32_t>(p + 24);
  h.shape_digest = Load<uint32_t>(p + 28);
  h.body_bytes = Load<uint32_t>(p + kBodyBytesOffset);
  h.contributors = Load<uint32_t>(p + 36);
  h.incarnation = Load<uint64_t>(p + 40);
  h.plan_digest = Load<uint32_t>(p + 48);
  h.nonfinite_rounds = Load<uint32_t>(p + 52);
  if (Load<uint32_t>(p + 56) != 0) return absl::InvalidArgumentError("reserved bytes of the frame header are not zero");
  return h;
}

// A segment's CRC is that of its header, extended by its payload.
uint32_t SegmentHeaderCrc(const uint8_t* header) { return Crc32c({header, kCrcOffsetInSegment}); }

// Where the parser's bytes come from, front to back: before it looks at bytes it fetches them.
// A chunk that lies in memory as it is.
struct InPlace {
  void Fetch(const uint8_t*, size_t) {}
  uint32_t FetchCrc(const uint8_t* p, size_t bytes, uint32_t crc) { return Crc32c({p, bytes}, crc); }
};

// A chunk that is gathered from slices; checksums are computed while it is copied.
struct Gather {
  std::span<const Bytes> slices;
  size_t slice = 0;
  size_t offset = 0;

  // Calls f(source bytes, where they go) for `bytes` bytes that go to p.
  template <typename F>
  void ForEachPiece(const uint8_t* p, size_t bytes, F f) {
    while (bytes > 0) {
      const std::span<const uint8_t> rest = slices[slice].span().subspan(offset);
      const size_t step = std::min(bytes, rest.size());
      f(rest.first(step), const_cast<uint8_t*>(p));
      p += step;
      bytes -= step;
      offset += step;
      if (step == rest.size()) {
        ++slice;
        offset = 0;
      }
    }
  }
  void Fetch(const uint8_t* p, size_t bytes) {
    ForEachPiece(p, bytes, [](std::span<const uint8_t> from, uint8_t* to) {
      if (!from.empty()) std::memcpy(to, from.data(), from.size());
    });
  }
  uint32_t FetchCrc(const uint8_t* p, size_t bytes, uint32_t crc) {
    ForEachPiece(p, bytes, [&crc](std::span<const uint8_t> from, uint8_t* to) { crc = CopyCrc32c(from, to, crc); });
    return crc;
  }
};

bool IsKnown(uint8_t type) {
  return (type >= 1 && type <= static_cast<uint8_t>(SegmentType::kFactors)) ||
         type == static_cast<uint8_t>(SegmentType::kList) || type == static_cast<uint8_t>(SegmentType::kNorms);
}

template <typename Source>
absl::StatusOr<Segment> LoadSegment(const uint8_t* p, size_t left, uint32_t number, Source& source) {
  if (left < kSegmentHeaderBytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("segment %d: %d bytes left, its header needs %d", number, left, kSegmentHeaderBytes));
  }
  source.Fetch(p, kSegmentHeaderBytes);
  Segment s;
  if (!IsKnown(p[0])) return absl::InvalidArgumentError(absl::StrFormat("segment %d: unknown type %d", number, p[0]));
  s.type = static_cast<SegmentType>(p[0]);
  s.param = p[1];
  if (Load<uint16_t>(p + 2) != 0) {
    return absl::InvalidArgumentError(absl::StrFormat("segment %d: reserved bytes are not zero", number));
  }
  s.bytes = Load<uint32_t>(p + 4);
  s.begin = Load<uint64_t>(p + 8);
  s.count = Load<uint32_t>(p + 16);
  if (Padded(s.bytes) > left - kSegmentHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrFormat("segment %d: claims %d payload bytes, %d are left", number,
                                                      s.bytes, left - kSegmentHeaderBytes));
  }
  s.data = p + kSegmentHeaderBytes;
  const uint32_t crc = source.FetchCrc(s.data, s.bytes, SegmentHeaderCrc(p));
  if (crc != Load<uint32_t>(p + kCrcOffsetInSegment)) {
    return absl::DataLossError(
        absl::StrFormat("segment %d (type %d) fails its CRC-32C (computed 0x%08x, stored 0x%08x)", number, p[0], crc,
                        Load<uint32_t>(p + kCrcOffsetInSegment)));
  }
  source.Fetch(s.data + s.bytes, Padded(s.bytes) - s.bytes);
  for (size_t i = s.bytes; i < Padded(s.bytes); ++i) {
    if (s.data[i] != 0) return absl::InvalidArgumentError(absl::StrFormat("segment %d: padding is not zero", number));
  }
  return s;
}

template <typename Source>
absl::StatusOr<Chunk> Parse(Bytes bytes, Source source) {
  if (bytes.size() > kMaxChunkBytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("frame chunk of %d bytes is over the limit of %d", bytes.size(), kMaxChunkBytes));
  }
  Chunk chunk;
  source.Fetch(bytes.data(), std::min(bytes.size(), kHeaderBytes));
  GW_ASSIGN_OR_RETURN(chunk.header, LoadHeader(bytes.span()));
  if (chunk.header.body_bytes != bytes.size() - kHeaderBytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("truncated frame chunk: the header promises %d bytes of body, %d came", chunk.header.body_bytes,
                        bytes.size() - kHeaderBytes));
  }
  if (chunk.header.segments > kMaxSegmentsPerChunk) {
    return absl::InvalidArgumentError(absl::StrFormat("%d segments in one chunk; at most %d are allowed",
                                                      chunk.header.segments, kMaxSegmentsPerChunk));
  }
  const uint8_t* p = bytes.data() + kHeaderBytes;
  size_t left = chunk.header.body_bytes;
  chunk.segments.reserve(chunk.header.segments);
  for (uint32_t i = 0; i < chunk.header.segments; ++i) {
    GW_ASSIGN_OR_RETURN(Segment segment, LoadSegment(p, left, i, source));
    const size_t size = kSegmentHeaderBytes + Padded(segment.bytes);
    p += size;
    left -= size;
    chunk.segments.push_back(segment);
  }
  if (left != 0) return absl::InvalidArgumentError(absl::StrFormat("%d bytes behind the last segment", left));
  chunk.bytes = std::move(bytes);
  return chunk;
}

}  // namespace

absl::StatusOr<FrameHeader> ParseHeader(std::span<const uint8_t> bytes) { return LoadHeader(bytes); }

absl::StatusOr<Chunk> ParseChunk(Bytes bytes) { return Parse(std::move(bytes), InPlace{}); }

absl::StatusOr<Chunk> ParseReceived(std::span<const Bytes> slices, std::vector<uint8_t>* scratch) {
  if (slices.size() == 1) return Parse(Bytes::Borrow(slices[0].span()), InPlace{});
  const size_t size = TotalSize(slices);
  if (scratch->size() < size) scratch->resize(size);
  return Parse(Bytes::Borrow({scratch->data(), size}), Gather{slices});
}

absl::StatusOr<std::vector<Chunk>> ParseFrame(std::span<const Bytes> chunks) {
  std::vector<Chunk> parsed;
  parsed.reserve(chunks.size());
  for (const Bytes& bytes : chunks) {
    GW_ASSIGN_OR_RETURN(Chunk chunk, ParseChunk(bytes));
    parsed.push_back(std::move(chunk));
  }
  GW_RETURN_IF_ERROR(CheckOrder(parsed));
  return parsed;
}

absl::Status CheckOrder(std::span<const Chunk> chunks) {
  if (chunks.empty()) return absl::InvalidArgumentError("a frame has at least one chunk");
  const FrameHeader& first = chunks[0].header;
  for (size_t i = 0; i < chunks.size(); ++i) {
    const FrameHeader& h = chunks[i].header;
    const bool same = h.kind == first.kind && h.bucket == first.bucket && h.shard == first.shard &&
                      h.round == first.round && h.shape_digest == first.shape_digest &&
                      h.contributors == first.contributors && h.incarnation == first.incarnation &&
                      h.plan_digest == first.plan_digest && h.nonfinite_rounds == first.nonfinite_rounds &&
                      ((h.flags ^ first.flags) & ~kLastChunk) == 0;
    const bool last = (h.flags & kLastChunk) != 0;
    if (h.chunk != i || !same || last != (i + 1 == chunks.size())) {
      return absl::InvalidArgumentError(
          absl::StrFormat("chunk %d of %d does not continue its frame (number %d, last %d, same identity %d)", i,
                          chunks.size(), h.chunk, last, same));
    }
  }
  return absl::OkStatus();
}

void AppendFrame(std::vector<Bytes>* frame, std::span<const Bytes> more) {
  const auto renumber = [](const Bytes& chunk, size_t number, bool last) {
    std::vector<uint8_t> bytes(chunk.data(), chunk.data() + chunk.size());
    uint8_t* p = bytes.data();
    const uint16_t flags = Load<uint16_t>(p + 6);
    Store<uint16_t>(p + 6, static_cast<uint16_t>(last ? flags | kLastChunk : flags & ~kLastChunk));
    Store<uint32_t>(p + 24, static_cast<uint32_t>(number));
    Store<uint32_t>(p + kCrcOffsetInHeader, Crc32c({p, kCrcOffsetInHeader}));
    return Bytes::FromVector(std::move(bytes));
  };
  frame->back() = renumber(frame->back(), frame->size() - 1, false);
  for (size_t i = 0; i < more.size(); ++i) {
    frame->push_back(renumber(more[i], frame->size(), i + 1 == more.size()));
  }
}

size_t PiecesOfChunk(std::span<const Bytes> pieces) {
  size_t found = pieces[0].size(), count = 1;
  if (found < kHeaderBytes) return count;
  const size_t size = kHeaderBytes + Load<uint32_t>(pieces[0].data() + kBodyBytesOffset);
  for (; found < size && count < pieces.size(); ++count) found += pieces[count].size();
  return count;
}

Bytes Flatten(std::span<const Bytes> slices) {
  if (slices.size() == 1) return slices[0];
  std::vector<uint8_t> joined;
  joined.reserve(TotalSize(slices));
  for (const Bytes& s : slices) joined.insert(joined.end(), s.data(), s.data() + s.size());
  return Bytes::FromVector(std::move(joined));
}

FrameWriter::FrameWriter(const FrameHeader& header, size_t chunk_bytes) : header_(header), chunk_bytes_(chunk_bytes) {}

void FrameWriter::OpenChunk::Reserve(size_t bytes, size_t limit) {
  if (bytes <= capacity) return;
  capacity = std::max(bytes, std::min(limit, 2 * capacity));
  std::shared_ptr<uint8_t[]> grown = std::make_shared_for_overwrite<uint8_t[]>(capacity);
  if (size != 0) std::memcpy(grown.get(), data.get(), size);
  data = std::move(grown);
}

uint8_t* FrameWriter::Open(const SegmentHeader& header, size_t kept) {
  const size_t size = kSegmentHeaderBytes + kept;
  if (chunks_.empty() || chunks_.back().size + kSegmentHeaderBytes + Padded(header.bytes) > chunk_bytes_ ||
      chunks_.back().segments == kMaxSegmentsPerChunk || !chunks_.back().borrowed.empty()) {
    chunks_.emplace_back();
    chunks_.back().Reserve(kHeaderBytes + size, chunk_bytes_);
    chunks_.back().size = kHeaderBytes;
  }
  OpenChunk& chunk = chunks_.back();
  chunk.Reserve(chunk.size + size, chunk_bytes_);
  open_segment_ = chunk.size;
  chunk.size += size;
  uint8_t* p = chunk.data.get() + open_segment_;
  std::memset(p, 0, kSegmentHeaderBytes);
  p[0] = static_cast<uint8_t>(header.type);
  p[1] = header.param;
  Store<uint32_t>(p + 4, header.bytes);
  Store<uint64_t>(p + 8, header.begin);
  Store<uint32_t>(p + 16, header.count);
  ++chunk.segments;
  return p;
}

uint8_t* FrameWriter::Begin(const SegmentHeader& header) {
  const size_t kept = Padded(header.bytes);
  uint8_t* const payload = Open(header, kept) + kSegmentHeaderBytes;
  std::memset(payload + header.bytes, 0, kept - header.bytes);
  return payload;
}

void FrameWriter::End() {
  uint8_t* p = chunks_.back().data.get() + open_segment_;
  Store<uint32_t>(p + kCrcOffsetInSegment,
                  Crc32c({p + kSegmentHeaderBytes, Load<uint32_t>(p + 4)}, SegmentHeaderCrc(p)));
}

void FrameWriter::Add(const SegmentHeader& header, const void* payload) {
  uint8_t* const p = Begin(header);
  uint8_t* const start = chunks_.back().data.get() + open_segment_;
  Store<uint32_t>(start + kCrcOffsetInSegment,
                  CopyCrc32c({static_cast<const uint8_t*>(payload), header.bytes}, p, SegmentHeaderCrc(start)));
}

void FrameWriter::Borrow(const SegmentHeader& header, std::shared_ptr<const void> owner, const void* payload) {
  if (header.bytes == 0) return Add(header, payload);
  Open(header, 0);
  chunks_.back().borrowed = Bytes(std::move(owner), static_cast<const uint8_t*>(payload), header.bytes);
  chunks_.back().borrowed_segment = open_segment_;
}

std::vector<Bytes> FrameWriter::Finish() { return FinishToSend().Take(); }

FrameToSend FrameWriter::FinishToSend() {
  if (chunks_.empty()) {
    chunks_.emplace_back();
    chunks_.back().Reserve(kHeaderBytes, chunk_bytes_);
    chunks_.back().size = kHeaderBytes;
  }
  std::vector<Bytes> out;
  out.reserve(chunks_.size());
  std::unique_ptr<FrameToSend::Late[]> late;
  const size_t count = chunks_.size();
  for (size_t i = 0; i < count; ++i) {
    OpenChunk& chunk = chunks_[i];
    FrameHeader h = header_;
    h.flags = static_cast<uint16_t>((header_.flags & ~kLastChunk) | (i + 1 == chunks_.size() ? kLastChunk : 0));
    h.chunk = static_cast<uint32_t>(i);
    h.segments = chunk.segments;
    h.body_bytes = static_cast<uint32_t>(chunk.size - kHeaderBytes + Padded(chunk.borrowed.size()));
    StoreHeader(h, chunk.data.get());
    if (!chunk.borrowed.empty()) {
      if (late == nullptr) late = std::make_unique<FrameToSend::Late[]>(count);
      late[i].head = chunk.data;
      late[i].segment = chunk.borrowed_segment;
      late[i].payload = chunk.borrowed;
    }
    const uint8_t* data = chunk.data.get();
    out.emplace_back(std::shared_ptr<const void>(std::move(chunk.data)), data, chunk.size);
    if (chunk.borrowed.empty()) continue;
    static constexpr uint8_t kPadding[8] = {};
    const size_t padding = Padded(chunk.borrowed.size()) - chunk.borrowed.size();
    out.push_back(std::move(chunk.borrowed));
    if (padding != 0) out.push_back(Bytes::Borrow({kPadding, padding}));
  }
  chunks_.clear();
  return FrameToSend(std::move(out), std::move(late), count);
}

FrameToSend::FrameToSend(std::vector<Bytes> pieces) : pieces_(std::move(pieces)) {}

FrameToSend::FrameToSend(std::vector<Bytes> pieces, std::unique_ptr<Late[]> late, size_t chunks)
    : pieces_(std::move(pieces)), late_(std::move(late)), chunks_(chunks) {}

std::vector<Bytes> FrameToSend::Take() && {
  for (size_t i = 0; i < chunks_; ++i) Complete(i);
  return std::move(pieces_);
}

void FrameToSend::Complete(size_t chunk) const {
  if (late_ == nullptr || late_[chunk].head == nullptr) return;
  Late& late = late_[chunk];
  absl::call_once(late.once, [&late] {
    uint8_t* const p = late.head.get() + late.segment;
    Store<uint32_t>(p + kCrcOffsetInSegment, Crc32c(late.payload.span(), SegmentHeaderCrc(p)));
  });
}

}  // namespace gradwire::wire

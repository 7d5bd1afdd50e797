// Frames on the wire: a header and checked segments, in chunks that each stand alone. Spec: proto/WIRE.md.
// A frame is a sequence of chunks; a chunk is one header and whole segments; each segment carries its own position and
// CRC, so a receiver merges it as it arrives and can take it back out if the rest never comes.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/base/call_once.h"
#include "absl/status/statusor.h"
#include "common/base/bytes.h"

namespace gradwire::wire {

inline constexpr uint32_t kMagic = 0x31465747u;  // "GWF1"
inline constexpr uint8_t kVersion = 1;
inline constexpr size_t kHeaderBytes = 64;
inline constexpr size_t kSegmentHeaderBytes = 24;
inline constexpr size_t kDefaultChunkBytes = 260u << 10;  // so that a receiver has it in its cache while it merges
inline constexpr size_t kMaxChunkBytes = 4u << 20;        // header and segments
inline constexpr uint32_t kMaxSegmentsPerChunk = 4096;

enum class FrameKind : uint8_t {
  kPush = 1,        // one worker's contribution to one (bucket, round)
  kInitialize = 2,  // the initial parameters of one bucket
  kUpdate = 3,      // the update frame of one (bucket, round)
  kParameters = 4,  // parameters (and, for replicas, optimizer state) of one bucket at a version
};

enum FrameFlags : uint16_t {
  kLastChunk = 1,
  kAbstain = 2,  // push: this worker contributes nothing to this (bucket, round), and is not waited for
  // push, with kAbstain: because its gradient is not finite, so that the round is to be skipped; update: it was.
  kNonFinite = 4,
  // push, with kAbstain: carries parameters that replace the job's; update: its dense body is parameters.
  kReplace = 8,
  kWithoutBody = 16,  // update: its body was left out, for whoever pulls plans
};

struct FrameHeader {
  FrameKind kind = FrameKind::kPush;
  uint16_t flags = 0;
  uint32_t bucket = 0;
  uint16_t shard = 0;
  uint16_t segments = 0;      // in this chunk
  uint64_t round = 0;         // push, update: the round; initialize, parameters: the version
  uint32_t chunk = 0;         // 0, 1, 2, ... within the frame
  uint32_t shape_digest = 0;  // BucketLayout::shape_digest: codec, runs and sharding of this bucket
  uint32_t body_bytes = 0;    // of this chunk, after the header
  uint32_t contributors = 0;  // update: number of workers in the mean; else 0
  uint64_t incarnation = 0;   // push, initialize: of the worker; else 0
  uint32_t plan_digest = 0;   // push: RoundPlan::Digest of the plan it was encoded by; else 0
  // update, parameters: rounds that were no steps, up to the version that the frame makes or has: a gradient was not
  // finite, or parameters were replaced; else 0
  uint32_t nonfinite_rounds = 0;
};

enum class SegmentType : uint8_t {
  kLearningRates = 1,  // float32 per parameter group
  kDenseF32 = 2,       // float32 elements; param: Array
  kDenseBf16 = 3,      // bfloat16 elements; param: Array
  kDenseInt = 4,       // little-endian two's complement elements; param: bytes each (1, 2, 4)
  kRanges = 5,         // per run the exponent this worker's values ask for
  kIndex = 6,          // set of element positions; param: IndexCoding
  kCells = 7,          // sketch cells; param: bytes each
  kExponents = 8,      // per run, of the next round (update) or of this version (parameters)
  kGeometry = 9,       // u32 sketch groups, u32 cells per group, of the next round
  kValues = 10,        // integers for the positions of the kIndex before it, `param` bits each: in older journals only
  kDeferred = 11,      // set of element positions that could not be decoded; param: IndexCoding
  kDensePacked = 12,   // zigzag integers of consecutive elements, bit-packed; param: bits each
  kQuantized = 13,     // whole runs, as the codec quantises them
  kSparse = 14,        // positions and values; param: SparseParam
  kLevels = 15,        // whole runs: a level per element, bit-packed; param: bits each
  kLevelSums = 16,     // whole runs: sums of levels, zigzag and bit-packed; param: bits each
  kFactors = 17,       // float32: factors of matrices, of the plan of the next round where it is an update's
  kList = 20,          // positions and their integers, coded; param: IndexCoding + 8 * (bits packed of each - 1)
  kNorms = 22,         // float64: squared norms of whole tensors; param: how many of each, 0: that of the mean of all
};

enum class Array : uint8_t { kParameter = 0, kFirstMoment = 1, kSecondMoment = 2, kUpdateResidual = 3 };

struct SegmentHeader {
  SegmentType type{};
  uint8_t param = 0;
  uint64_t begin = 0;  // first element, cell or run
  uint32_t count = 0;  // elements, cells or runs covered
  uint32_t bytes = 0;  // of payload, without padding
};

struct Segment : SegmentHeader {
  const uint8_t* data = nullptr;  // borrowed from the chunk; 8-byte aligned relative to the chunk's start
  std::span<const uint8_t> payload() const { return {data, bytes}; }
};

struct Chunk {
  FrameHeader header;
  std::vector<Segment> segments;  // point into `bytes`
  Bytes bytes;                    // borrowed by ParseReceived
};

// Parses and checks one chunk: sizes, known kinds and types, CRCs, nothing left over. Positions are checked by who
// merges them. Errors: InvalidArgument or DataLoss (CRC) with what was expected and found; never reads out of bounds.
absl::StatusOr<Chunk> ParseChunk(Bytes bytes);

// The same for a chunk that arrived in slices. If there are several they are joined in `scratch`, which is reused from
// call to call and so stays in a core's cache. Nothing is owned: the chunk is valid until slices or scratch change.
absl::StatusOr<Chunk> ParseReceived(std::span<const Bytes> slices, std::vector<uint8_t>* scratch);

// The header alone, its own CRC checked: says whose frame it is when the rest of a chunk is damaged.
absl::StatusOr<FrameHeader> ParseHeader(std::span<const uint8_t> bytes);

// Parses every chunk of a frame and checks their order.
absl::StatusOr<std::vector<Chunk>> ParseFrame(std::span<const Bytes> chunks);
// The order of parsed chunks: numbers from 0, same identity, exactly the last one flagged kLastChunk. Else
// InvalidArgument.
absl::Status CheckOrder(std::span<const Chunk> chunks);

// Appends the segments of the frame `more`, whose header says the same, to those of `frame`.
void AppendFrame(std::vector<Bytes>* frame, std::span<const Bytes> more);

// One contiguous Bytes of a message that arrived in slices; copies only if there is more than one.
Bytes Flatten(std::span<const Bytes> slices);

// How many of `pieces` (at least one) FrameWriter made of the first chunk there.
size_t PiecesOfChunk(std::span<const Bytes> pieces);

// A frame to be sent, maybe to several: chunks in pieces, one chunk after the other (PiecesOfChunk). Checksums of
// borrowed payloads may still be missing; Complete computes them. Thread-safe.
class FrameToSend {
 public:
  FrameToSend(std::vector<Bytes> pieces);  // with all checksums; NOLINT(google-explicit-constructor)
  FrameToSend(FrameToSend&&) = default;
  FrameToSend& operator=(FrameToSend&&) = default;

  const std::vector<Bytes>& pieces() const { return pieces_; }
  // To be called before a chunk's pieces are read, by its number in the frame: reads its payload, which is then in a
  // core's cache for whoever sends it. Chunks that are complete stay as they are.
  void Complete(size_t chunk) const;
  // The pieces, all of them complete.
  std::vector<Bytes> Take() &&;

 private:
  friend class FrameWriter;
  struct Late {
    absl::once_flag once;
    std::shared_ptr<uint8_t[]> head;  // the first piece; null: it is complete
    size_t segment = 0;               // offset of the header of its last segment there
    Bytes payload;                    // of that segment
  };
  FrameToSend(std::vector<Bytes> pieces, std::unique_ptr<Late[]> late, size_t chunks);

  std::vector<Bytes> pieces_;
  std::unique_ptr<Late[]> late_;  // per chunk; null: all are complete
  size_t chunks_ = 0;
};

// Builds a frame. Not thread-safe.
class FrameWriter {
 public:
  // `header`: flags may carry all but kLastChunk; segments, chunk, body_bytes and kLastChunk are filled in.
  explicit FrameWriter(const FrameHeader& header, size_t chunk_bytes = kDefaultChunkBytes);
  // Starts a segment of exactly `header.bytes` payload bytes, in a new chunk if this one is full, and returns where
  // to write them; valid until the next call. Payload must fit a chunk (see max_payload).
  uint8_t* Begin(const SegmentHeader& header);
  // The payload is written: computes its CRC.
  void End();
  void Add(const SegmentHeader& header, const void* payload);
  // As Add, without copying or reading: the chunk ends with this payload, in memory that stays as it is while `owner`
  // lives.
  void Borrow(const SegmentHeader& header, std::shared_ptr<const void> owner, const void* payload);
  const FrameHeader& header() const { return header_; }
  size_t max_payload() const { return chunk_bytes_ - kHeaderBytes - kSegmentHeaderBytes - 8; }
  // Closes the frame. A frame without segments is one chunk. Chunks with a borrowed payload are several pieces, one
  // after the other (PiecesOfChunk).
  std::vector<Bytes> Finish();
  // The same, without the checksums of borrowed payloads.
  FrameToSend FinishToSend();

 private:
  struct OpenChunk {
    std::shared_ptr<uint8_t[]> data;  // not zeroed: payloads are written once
    size_t size = 0;
    size_t capacity = 0;
    uint16_t segments = 0;
    Bytes borrowed;               // payload of the last segment, where that is not in `data`
    size_t borrowed_segment = 0;  // offset of its header
    void Reserve(size_t bytes, size_t limit);
  };
  // Starts a segment of which `kept` bytes, with padding, will follow the header; returns where it is.
  uint8_t* Open(const SegmentHeader& header, size_t kept);

  FrameHeader header_;
  size_t chunk_bytes_;
  std::vector<OpenChunk> chunks_;
  size_t open_segment_ = 0;  // offset of the open segment's header in the last chunk
};

}  // namespace gradwire::wire

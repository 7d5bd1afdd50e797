// What a worker sends beside its sketch: positions and integers of the elements for which its share of the sketch has
// no room. Spec: proto/WIRE.md, "Frames of the TAGC codec".
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "common/codec/tagc/tagc_shape.h"

namespace gradwire::tagc {

// An element and an integer that was sent for it.
struct Listed {
  uint32_t position = 0;
  int32_t integer = 0;
};

// Bytes that a listed segment of `payload` bytes counts towards TagcShape::listed_bytes.
inline uint64_t ListedBytesOf(uint64_t payload) { return payload + wire::kSegmentHeaderBytes; }

inline constexpr uint32_t kMaxListedPerSegment = 1u << 15;  // 4 bytes each for position and integer fit a chunk

// Writes positions (ascending) and their integers as segments that cover [begin, end).
void AddListed(const TagcShape& shape, std::span<const uint32_t> positions, std::span<const int32_t> integers,
               uint64_t begin, uint64_t end, wire::FrameWriter* writer);

// The listed segments of one round, as they came: decoded, one takes four times the memory. Not thread-safe.
class ListedSegments {
 public:
  explicit ListedSegments(const TagcShape& shape) : shape_(shape) {}

  // At most this many bytes are held: what frames of max_workers have.
  static uint64_t Limit(const TagcShape& shape) { return shape.listed_bytes * shape.max_workers(); }

  void Clear();
  // Its range must have been checked against the bucket. Errors: InvalidArgument; nothing is changed then.
  absl::Status Add(const wire::Segment& segment);
  // Exactly undoes an Add that succeeded.
  void Remove(const wire::Segment& segment);
  bool empty() const { return held_.empty(); }
  // What all segments say together: one entry per position, ascending, sums of 0 among them.
  std::vector<Listed> Sums() const;
  uint64_t entries() const { return entries_; }  // of all segments
  size_t memory_bytes() const { return held_.capacity(); }

 private:
  absl::Status Read(const wire::SegmentHeader& header, std::span<const uint8_t> payload,
                    std::vector<Listed>* out) const;
  // Calls fn(header, payload, offset in held_) for each segment until it returns false.
  template <typename Fn>
  void ForEach(Fn fn) const;

  const TagcShape shape_;
  std::vector<uint8_t> held_;  // headers, each followed by its payload
  uint64_t entries_ = 0;
  std::vector<Listed> scratch_;
};

}  // namespace gradwire::tagc

// The sums of all lists of a round. Spec: proto/WIRE.md, "Frames of the TAGC codec".
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/base/large_array.h"
#include "common/codec/bits/integer_code.h"
#include "common/codec/tagc/tagc_shape.h"

namespace gradwire::tagc {

// What the lists of a round add up to: an integer for every element, as wide as a cell. max_workers frames fit it
// (TagcShape::limit); additions are modulo its width, so that any of them can be taken back. Not thread-safe.
class ListSums {
 public:
  explicit ListSums(const TagcShape& shape) : shape_(shape) {}

  // What the lists of a round take.
  static uint64_t Bytes(const TagcShape& shape) { return SumBytes(shape) + Words(shape) * sizeof(uint64_t); }

  void Clear();
  // Its range must have been checked against the bucket. Errors: InvalidArgument; nothing is changed then.
  absl::Status Add(const wire::Segment& segment);
  // Exactly undoes an Add that succeeded.
  void Remove(const wire::Segment& segment);
  bool empty() const { return entries_ == 0; }
  uint64_t entries() const { return entries_; }  // of all lists
  // Elements whose sum is not 0, ascending, and their sums; then clears, while they are at hand.
  void Take(std::vector<uint32_t>* positions, std::vector<int32_t>* integers);
  size_t memory_bytes() const { return sums_.capacity() + reached_.capacity() * sizeof(uint64_t); }

 private:
  static constexpr uint32_t kPage = 64;  // elements
  static uint64_t Pages(const TagcShape& shape) { return (shape.elements() + kPage - 1) / kPage; }
  static uint64_t Words(const TagcShape& shape) { return (Pages(shape) + 63) / 64; }
  static uint64_t SumBytes(const TagcShape& shape) {
    return Pages(shape) * kPage * static_cast<uint64_t>(shape.cell_bytes);
  }
  // Fills positions_ and integers_.
  absl::Status Read(const wire::Segment& segment);
  void Merge(kernels::Sign sign);

  const TagcShape shape_;
  // Allocated for the first list.
  LargeArray<uint8_t> sums_;  // little-endian
  // A bit for each page that a list reached; sums elsewhere are 0. A bit for each element would be another line of
  // memory to wait for with each of them.
  std::vector<uint64_t> reached_;
  bool dirty_ = false;  // something was added since Clear
  uint64_t entries_ = 0;
  // Of one segment.
  std::vector<uint32_t> positions_;
  std::vector<int32_t> integers_;
  IntegerScratch scratch_;
};

}  // namespace gradwire::tagc

// What sparse codecs merge into: sums on the grid, and how many workers sent each position.
//
// WholeSums has a place for every element. PagedSums has one for pages of elements that somebody sent: memory and the
// time of a round grow with these, as the gradients of embeddings ask for. Both give the same sums. Not thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "common/base/large_array.h"
#include "common/codec/grid/grid_sums.h"
#include "common/codec/sparse/sparse_segment.h"
#include "common/codec/tagc/position_counters.h"

namespace gradwire::sparse {

class WholeSums {
 public:
  explicit WholeSums(const CodecContext& context);
  static size_t MostBytes(const CodecContext& context);

  void Clear();
  // Errors: that of a value that is not finite, or too large, or of a position that more workers sent than the job has;
  // nothing was added then. Positions ascend, and lie in the bucket.
  absl::Status Add(const Pairs& pairs);
  // Undoes an Add.
  void Remove(const Pairs& pairs);
  std::vector<uint32_t> Union() const { return counts_.Union(); }
  uint64_t Total() const { return counts_.Total(); }
  // The means at `positions`, which are Union(); clears.
  void TakeMeans(std::span<const uint32_t> positions, uint32_t contributors, float* out);
  // Those of [begin, begin + count).
  void Means(uint64_t begin, uint32_t count, uint32_t contributors, float* out) const {
    sums_.Means(begin, count, contributors, out);
  }
  LookAhead ahead() const { return sums_.ahead(); }
  size_t memory_bytes() const { return bytes_; }

 private:
  const size_t bytes_;
  GridSums sums_;
  tagc::PositionCounters counts_;
};

class PagedSums {
 public:
  explicit PagedSums(const CodecContext& context);
  static size_t MostBytes(const CodecContext& context);

  // As those of WholeSums.
  void Clear();
  absl::Status Add(const Pairs& pairs);
  void Remove(const Pairs& pairs);
  std::vector<uint32_t> Union() const;
  uint64_t Total() const;
  void TakeMeans(std::span<const uint32_t> positions, uint32_t contributors, float* out);
  void Means(uint64_t begin, uint32_t count, uint32_t contributors, float* out) const;
  LookAhead ahead() const { return {}; }
  size_t memory_bytes() const;

 private:
  static constexpr uint32_t kPage = 64;  // elements: a word of each plane of counts
  static constexpr uint32_t kNone = 0;

  // Calls fn(slot, mask, first, last) for the positions first to last of each page, which has a slot.
  template <typename Fn>
  void ForEachPage(std::span<const uint32_t> positions, Fn fn) const;
  // Gives every page of these positions a slot.
  void MakeSlots(std::span<const uint32_t> positions);
  void AddValues(const Pairs& pairs, kernels::Sign sign);
  // -1, or the first position whose count cannot grow; nothing is counted then.
  int64_t Count(std::span<const uint32_t> positions);
  void Uncount(std::span<const uint32_t> positions);
  uint64_t Sent(uint32_t slot) const;  // those of a page that somebody sent

  const CodecContext context_;
  const uint32_t limit_bits_;
  const uint32_t planes_;         // of counts
  std::vector<uint32_t> slots_;   // of each page: 1 + its slot, or kNone
  std::vector<uint32_t> pages_;   // that have a slot, by slot
  LargeArray<int64_t> sums_;      // of each slot kPage; 0 behind pages_.size()
  std::vector<uint64_t> counts_;  // of each slot planes_, the lowest bit first; 0 as well
};

}  // namespace gradwire::sparse

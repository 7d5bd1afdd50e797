// Peeling, one group at a time, in memory that stays in the L2 cache.
// An element is a record: its three cells, kRecordBits each. A cell is one 64-bit word
//     value * 2^32 + sum of (number * 2^16 + 1) over its unresolved elements
// so that adding and removing an element is one addition. Everything is linear in Z/2^64: whatever the sum of numbers
// carries into the value is taken back when the elements leave, and where the low 16 bits count just one element, the
// word is that element's value, number and 1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/backend.h"
#include "kernels/cpu/simd/buffer.h"

namespace gradwire::kernels {

inline constexpr int kRecordBits = 21;
inline constexpr uint64_t kRecordMask = (uint64_t{1} << kRecordBits) - 1;
inline constexpr uint64_t kResolved = uint64_t{1} << 63;  // a record that became value (low 32 bits) is marked so
inline constexpr uint32_t kLargestGroup = 0xFFFF;         // elements that 16 bits can number and count

// The arrays of one call. Fill records(), group_of() and group_size(); then SortByGroup.
class Peeler {
 public:
  Peeler(const SketchArgs& args, size_t n);

  uint64_t* records() { return records_.u64(); }
  uint32_t* group_of() { return group_of_.u32(); }
  uint32_t* group_size() { return group_size_.u32(); }  // zero at first
  bool GroupsFit();
  void SortByGroup();

  const SketchArgs& args() const { return args_; }
  size_t n() const { return n_; }
  uint64_t* sorted() { return sorted_.u64(); }  // the records, group by group, in the order of the positions
  uint32_t* begin() { return begin_.u32(); }    // of each group, within sorted(); groups + 1 of them
  uint32_t* cursor() { return group_size_.u32(); }
  uint64_t* words() { return words_.u64(); }  // one per cell of a group
  uint32_t* queue() { return queue_.u32(); }

 private:
  const SketchArgs args_;
  const size_t n_;
  simd::Buffer records_, group_of_, group_size_, sorted_, begin_, words_, queue_;
};

// Resolves what it can of one group's m elements; resolved records become kResolved | value. In the order of a queue,
// so that one element's cache misses overlap with the next one's; without a branch on whether a cell is still of use.
template <typename T>
inline __attribute__((always_inline)) void PeelGroup(const uint8_t* cells, uint32_t third, uint64_t* records,
                                                     uint32_t m, uint64_t* words, uint32_t* queue) {
  const uint32_t size = 3 * third;
  for (uint32_t c = 0; c < size; ++c) {
    T value;
    std::memcpy(&value, cells + c * sizeof(T), sizeof(T));
    words[c] = static_cast<uint64_t>(static_cast<uint32_t>(value)) << 32;
  }
  uint64_t* const second_words = words + third;
  uint64_t* const third_words = words + 2 * third;
  for (uint32_t i = 0; i < m; ++i) {
    const uint64_t record = records[i];
    const uint64_t term = (uint64_t{i} << 16) + 1;
    words[record & kRecordMask] += term;
    second_words[record >> kRecordBits & kRecordMask] += term;
    third_words[record >> (2 * kRecordBits)] += term;
  }
  uint32_t tail = 0;
  for (uint32_t c = 0; c < size; ++c) {
    queue[tail] = c;
    tail += static_cast<uint16_t>(words[c]) == 1 ? 1 : 0;
  }
  uint64_t nowhere = 0;  // stands in for the record of a cell that has become empty since it was queued
  for (uint32_t head = 0; head < tail; ++head) {
    const uint64_t word = words[queue[head]];
    const bool one = static_cast<uint16_t>(word) == 1;
    const uint64_t term = one ? word : 0;
    uint64_t* const slot = one ? records + static_cast<uint16_t>(word >> 16) : &nowhere;
    const uint64_t record = one ? *slot : 0;
    *slot = kResolved | (word >> 32);
    const uint32_t at[3] = {static_cast<uint32_t>(record & kRecordMask),
                            third + static_cast<uint32_t>(record >> kRecordBits & kRecordMask),
                            2 * third + static_cast<uint32_t>(record >> (2 * kRecordBits))};
    for (const uint32_t c : at) {
      const uint64_t left = words[c] - term;
      words[c] = left;
      queue[tail] = c;
      tail += one && static_cast<uint16_t>(left) == 1 ? 1 : 0;
    }
  }
}

// T: the type of a cell.
template <typename T>
inline __attribute__((always_inline)) void PeelAll(Peeler& peeler, const uint8_t* cells, int32_t* sums,
                                                   uint8_t* resolved) {
  const SketchArgs& args = peeler.args();
  const uint32_t* const begin = peeler.begin();
  uint64_t* const sorted = peeler.sorted();
  for (uint32_t g = 0; g < args.groups; ++g) {
    if (begin[g] == begin[g + 1]) continue;
    PeelGroup<T>(cells + size_t{g} * args.cells_per_group * sizeof(T), args.cells_per_group / 3, sorted + begin[g],
                 begin[g + 1] - begin[g], peeler.words(), peeler.queue());
  }
  // Back into the order of the positions: each group's elements were sorted stably.
  uint32_t* const cursor = peeler.cursor();
  std::memcpy(cursor, begin, size_t{args.groups} * sizeof(uint32_t));
  const uint32_t* const group_of = peeler.group_of();
  for (size_t i = 0; i < peeler.n(); ++i) {
    const uint64_t record = sorted[cursor[group_of[i]]++];
    const bool done = (record & kResolved) != 0;
    sums[i] = done ? static_cast<T>(record) : 0;
    resolved[i] = done ? 1 : 0;
  }
}

}  // namespace gradwire::kernels

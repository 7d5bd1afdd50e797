// The sketch. Adding: 32-bit sums of all cells, then into the cells. Peeling: elements are sorted by group, then one
// block peels one group with its cells in shared memory. Contracts: kernels/backend.h; cells: math/sketch.h. All sums
// are modulo 2^32, of which the low bits count, and every order of adding and peeling gives the same.
#pragma once

#include "kernels/cuda/bodies/block.cuh"
#include "kernels/cuda/bodies/lanes.cuh"
#include "kernels/cuda/device_values.h"
#include "kernels/cuda/tuning.h"
#include "kernels/math/sketch.h"

namespace gradwire::kernels::cuda {

// sums[cell] += integer, for the three cells of each element. Cells of one and two bytes have no atomics of their own;
// the sums of all cells fit the GPU's cache, which is where its atomics are done.
struct AddToCellSumsOp {
  const uint32_t* positions;
  const int32_t* integers;
  uint64_t salt;
  uint32_t groups;
  uint32_t third;  // cells per group / 3
  uint32_t* sums;

  GW_DEVICE void Run(uint64_t i) const {
    const SketchCells at = CellsOf(positions[i], salt, groups, third);
    const uint64_t group = uint64_t{at.group} * (3 * third);
    for (uint32_t c : at.cell) AtomicAdd(&sums[group + c], static_cast<uint32_t>(integers[i]));
  }
};

// T: uint8_t, uint16_t, uint32_t.
template <class T>
struct AddSumsToCellsOp {
  static constexpr int kLanes = 4;
  Packed<T, uint8_t> cells;
  Typed<const uint32_t> sums;

  bool aligned() const { return AllAligned<kLanes>(cells, sums); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    EachLane<N>(
        i, [&](int, T& cell, uint32_t sum) { cell = static_cast<T>(cell + sum); }, cells, sums);
  }
};

struct SketchItem {
  uint32_t element;   // index into the list
  uint32_t position;  // positions[element]: looked up once, where neighbours in the list are neighbours in memory
};

// What the kernels that sort by group share. items[offsets[g] .. offsets[g + 1]) are those of group g, in any order.
struct SketchGroups {
  const uint32_t* positions;
  ElementCount count;
  uint64_t salt;
  uint32_t groups;
  uint32_t third;     // cells per group / 3
  uint32_t* offsets;  // groups + 1
  uint32_t* cursor;   // groups: counts, then the next free place of each group
  SketchItem* items;  // count

  GW_DEVICE SketchItem ItemAt(uint64_t i) const { return {static_cast<uint32_t>(i), positions[i]}; }
  GW_DEVICE uint32_t GroupOf(uint32_t position) const { return SketchGroup(SketchHash(position, salt), groups); }
  GW_DEVICE SketchCells Cells(uint32_t position) const { return CellsOf(position, salt, groups, third); }
};

// cursor[g] += elements of group g. `cursor` starts at 0.
struct CountByGroup {
  static constexpr Tuning kTuning = tuning::kGroup;
  static constexpr uint64_t kTile = uint64_t{kTuning.threads} * kTuning.per_thread;
  SketchGroups s;

  template <class Block>
  GW_DEVICE void operator()(Block& block) const {
    const bool shared = s.groups <= tuning::kSharedGroups;
    uint32_t* counts = shared ? block.template Shared<uint32_t>() : s.cursor;
    block.Phase([&](uint32_t thread) {
      for (uint32_t g = thread; shared && g < s.groups; g += kTuning.threads) counts[g] = 0;
    });
    block.Phase([&](uint32_t thread) {
      const uint64_t n = s.count.get();
      for (uint64_t i = block.index() * kTuning.threads + thread; i < n; i += block.count() * kTuning.threads) {
        AtomicAdd(&counts[s.GroupOf(s.positions[i])], 1u);
      }
    });
    block.Final([&](uint32_t thread) {
      for (uint32_t g = thread; shared && g < s.groups; g += kTuning.threads) {
        if (counts[g] != 0) AtomicAdd(&s.cursor[g], counts[g]);
      }
    });
  }
};

// offsets = exclusive sums of the counts in `cursor`, which becomes a copy of them. One block.
struct ScanGroups {
  static constexpr Tuning kTuning = tuning::kGroupScan;
  SketchGroups s;

  template <class Block>
  GW_DEVICE void operator()(Block& block) const {
    uint32_t carry = 0;
    typename Block::template PerThread<uint32_t> before(block);
    for (uint64_t base = 0; base < s.groups; base += kTuning.threads) {
      block.Phase([&](uint32_t thread) { before[thread] = base + thread < s.groups ? s.cursor[base + thread] : 0; });
      const uint32_t total = block.ExclusiveSum(before);
      block.Phase([&](uint32_t thread) {
        const uint64_t g = base + thread;
        if (g >= s.groups) return;
        s.offsets[g] = carry + before[thread];
        s.cursor[g] = carry + before[thread];
      });
      carry += total;
    }
    block.Final([&](uint32_t thread) {
      if (thread == 0) s.offsets[s.groups] = carry;
    });
  }
};

// Writes each element to its group's part of `items`. A tile claims its places in a group at once.
struct ScatterToGroups {
  static constexpr Tuning kTuning = tuning::kGroup;
  static constexpr int kPerThread = kTuning.per_thread;
  static constexpr uint64_t kTile = uint64_t{kTuning.threads} * kPerThread;
  SketchGroups s;

  struct Mine {
    uint32_t position[kPerThread];
    uint32_t group[kPerThread];
    uint32_t rank[kPerThread];
  };

  template <class Block>
  GW_DEVICE void operator()(Block& block) const {
    const uint64_t n = s.count.get();
    if (s.groups > tuning::kSharedGroups) {
      block.Final([&](uint32_t thread) {
        for (uint64_t i = block.index() * kTuning.threads + thread; i < n; i += block.count() * kTuning.threads) {
          const SketchItem item = s.ItemAt(i);
          s.items[AtomicAdd(&s.cursor[s.GroupOf(item.position)], 1u)] = item;
        }
      });
      return;
    }
    uint32_t* places = block.template Shared<uint32_t>();
    typename Block::template PerThread<Mine> mine(block);
    for (uint64_t tile = block.index() * kTile; tile < n; tile += block.count() * kTile) {
      block.Phase([&](uint32_t thread) {
        for (uint32_t g = thread; g < s.groups; g += kTuning.threads) places[g] = 0;
      });
      block.Phase([&](uint32_t thread) {
        GW_UNROLL
        for (int k = 0; k < kPerThread; ++k) {
          const uint64_t i = tile + uint64_t{kTuning.threads} * k + thread;
          if (i >= n) break;
          mine[thread].position[k] = s.positions[i];
          mine[thread].group[k] = s.GroupOf(mine[thread].position[k]);
          mine[thread].rank[k] = AtomicAdd(&places[mine[thread].group[k]], 1u);
        }
      });
      block.Phase([&](uint32_t thread) {
        for (uint32_t g = thread; g < s.groups; g += kTuning.threads) {
          if (places[g] != 0) places[g] = AtomicAdd(&s.cursor[g], places[g]);
        }
      });
      block.Phase([&](uint32_t thread) {
        GW_UNROLL
        for (int k = 0; k < kPerThread; ++k) {
          const uint64_t i = tile + uint64_t{kTuning.threads} * k + thread;
          if (i >= n) break;
          s.items[places[mine[thread].group[k]] + mine[thread].rank[k]] = {static_cast<uint32_t>(i),
                                                                           mine[thread].position[k]};
        }
      });
    }
  }
};

// Peels each group in rounds. A cell's state is one word: the number of unresolved elements on it times kOne, plus the
// sum of their numbers within the group. Sums that carry only raise the upper half, and never by more than its number
// of elements, so exactly a cell with one element left reads as 1 there, its number below.
//
// A round takes the cells that came to hold one element in the round before. An element may be alone in several cells:
// the first of its three resolves it, so no two threads do. Then its value leaves its three cells, and each cell that
// comes to hold one element is queued. Every cell is queued at most once, so the queue has room for `3 * third`.
//
// T: bytes of a cell. Word, Index: uint32_t and uint16_t for groups of up to 2^15 - 1 elements whose cells fit shared
// memory; uint64_t and uint32_t for all others, in slots of device memory.
template <class T, class Word, class Index>
struct PeelGroups {
  static constexpr Tuning kTuning = tuning::kPeel;
  static constexpr bool kShared = sizeof(Word) == 4;
  static constexpr int kNumberBits = 4 * sizeof(Word);
  static constexpr Word kOne = Word{1} << kNumberBits;
  static constexpr Index kNone = static_cast<Index>(~Index{0});
  static constexpr uint64_t kMaxElements = kShared ? (1u << 15) - 1 : ~uint64_t{0};
  static constexpr uint64_t kMaxCells = kShared ? kNone : ~uint64_t{0};

  SketchGroups s;
  const uint8_t* cells;
  bool aligned;  // cells, to T
  int32_t* sums;
  uint8_t* resolved;
  uint64_t min_elements;  // groups with fewer are left to another launch
  uint8_t* slots;         // SlotBytes for each block; null where kShared

  static GW_HOST_DEVICE uint64_t SlotBytes(uint32_t third) {
    const uint64_t bytes = 16 + uint64_t{3} * third * (sizeof(Word) + sizeof(uint32_t) + sizeof(Index));
    return (bytes + 15) / 16 * 16;
  }

  static GW_DEVICE bool HoldsOne(Word word) { return word >> kNumberBits == 1; }
  static GW_DEVICE int32_t SignExtend(uint32_t value) {
    constexpr int kUnused = 32 - 8 * static_cast<int>(sizeof(T));
    return static_cast<int32_t>(value << kUnused) >> kUnused;
  }

  struct State {
    uint32_t* queued;
    Word* words;
    uint32_t* values;
    Index* queue;
  };

  GW_DEVICE State Layout(uint8_t* memory, uint32_t size) const {
    State at;
    at.queued = reinterpret_cast<uint32_t*>(memory);
    at.words = reinterpret_cast<Word*>(memory + 16);
    at.values = reinterpret_cast<uint32_t*>(at.words + size);
    at.queue = reinterpret_cast<Index*>(at.values + size);
    return at;
  }

  GW_DEVICE void Enqueue(const State& at, uint32_t cell) const {
    at.queue[AtomicAdd(at.queued, 1u)] = static_cast<Index>(cell);
  }

  template <class Block>
  GW_DEVICE void Build(Block& block, const State& at, uint64_t g, uint32_t begin, uint32_t end) const {
    const uint32_t size = 3 * s.third;
    block.Phase([&](uint32_t thread) {
      const uint8_t* group = cells + g * size * sizeof(T);
      for (uint32_t c = thread; c < size; c += kTuning.threads) {
        at.words[c] = 0;
        at.values[c] = LoadOne<T>(group, c, aligned);
      }
    });
    block.Phase([&](uint32_t thread) {
      if (thread == 0) *at.queued = 0;  // not a phase earlier: threads may still be leaving the loop that reads it
      for (uint32_t e = begin + thread; e < end; e += kTuning.threads) {
        const SketchCells of = s.Cells(s.items[e].position);
        for (uint32_t c : of.cell) AtomicAdd(&at.words[c], kOne + Word{e - begin});
      }
    });
    block.Phase([&](uint32_t thread) {
      for (uint32_t c = thread; c < size; c += kTuning.threads) {
        if (HoldsOne(at.words[c])) Enqueue(at, c);
      }
    });
  }

  GW_DEVICE uint32_t NumberOn(const State& at, uint32_t cell) const {
    return static_cast<uint32_t>(at.words[cell] & (kOne - 1));
  }

  // Leaves in the queue the cells that resolve an element.
  template <class Block>
  GW_DEVICE void Resolve(Block& block, const State& at, uint32_t begin, uint32_t from, uint32_t to) const {
    block.Phase([&](uint32_t thread) {
      for (uint32_t i = from + thread; i < to; i += kTuning.threads) {
        const uint32_t cell = at.queue[i];
        at.queue[i] = kNone;
        if (!HoldsOne(at.words[cell])) continue;
        const SketchCells of = s.Cells(s.items[begin + NumberOn(at, cell)].position);
        const uint32_t first = HoldsOne(at.words[of.cell[0]])   ? of.cell[0]
                               : HoldsOne(at.words[of.cell[1]]) ? of.cell[1]
                                                                : of.cell[2];
        if (first == cell) at.queue[i] = static_cast<Index>(cell);
      }
    });
  }

  // Takes the elements of those cells out of all of their cells. No other thread touches a cell that holds one element
  // before that is out.
  template <class Block>
  GW_DEVICE void Remove(Block& block, const State& at, uint32_t begin, uint32_t from, uint32_t to) const {
    block.Phase([&](uint32_t thread) {
      for (uint32_t i = from + thread; i < to; i += kTuning.threads) {
        const Index cell = at.queue[i];
        if (cell == kNone) continue;
        const uint32_t number = NumberOn(at, cell);
        const SketchItem item = s.items[begin + number];
        const int32_t sum = SignExtend(at.values[cell]);
        const SketchCells of = s.Cells(item.position);
        const Word word = kOne + Word{number};
        sums[item.element] = sum;
        resolved[item.element] = 1;
        for (uint32_t c : of.cell) {
          AtomicAdd(&at.values[c], 0u - static_cast<uint32_t>(sum));
          const Word left = static_cast<Word>(AtomicAdd(&at.words[c], static_cast<Word>(0 - word)) - word);
          if (HoldsOne(left)) Enqueue(at, c);
        }
      }
    });
  }

  template <class Block>
  GW_DEVICE void operator()(Block& block) const {
    uint8_t* memory = kShared ? block.template Shared<uint8_t>() : slots + block.index() * SlotBytes(s.third);
    const State at = Layout(memory, 3 * s.third);
    for (uint64_t g = block.index(); g < s.groups; g += block.count()) {
      const uint32_t begin = s.offsets[g], end = s.offsets[g + 1];
      if (end - begin < min_elements || end - begin > kMaxElements || begin == end) continue;
      Build(block, at, g, begin, end);
      uint32_t from = 0;
      for (;;) {
        const uint32_t to = *at.queued;
        if (from == to) break;
        Resolve(block, at, begin, from, to);
        Remove(block, at, begin, from, to);
        from = to;
      }
    }
  }
};

}  // namespace gradwire::kernels::cuda

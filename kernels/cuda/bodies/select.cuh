// Range, histograms, the threshold, and taking what is selected. Contracts: kernels/backend.h; the rule of the
// threshold: math/select.h.
#pragma once

#include "kernels/cuda/bodies/block.cuh"
#include "kernels/cuda/device_values.h"
#include "kernels/cuda/tuning.h"
#include "kernels/math/fixed_point.h"
#include "kernels/math/select.h"

namespace gradwire::kernels::cuda {

// f(x) for every element of a sample, or all: blocks stride over them, each thread takes vectors of four, which stay
// within a line.
template <int kThreads, class Block, class F>
GW_DEVICE void ForEachStrided(const Block& block, uint32_t thread, const float* x, const LineSample& sample,
                              bool vectors, F f) {
  constexpr int kLanes = 4;
  static_assert(kSampleLine % kLanes == 0);
  const uint64_t stride = block.count() * kThreads;
  const uint64_t first = block.index() * kThreads + thread;
  const uint64_t whole = vectors ? sample.size / kLanes : 0;
  for (uint64_t i = first; i < whole; i += stride) {
    const Vector<float, kLanes> v = Load<float, kLanes>(x, sample.At(i * kLanes));
    GW_UNROLL
    for (int k = 0; k < kLanes; ++k) f(v.v[k]);
  }
  for (uint64_t i = whole * kLanes + first; i < sample.size; i += stride) f(x[sample.At(i)]);
}

// *largest = max(*largest, bits of each |x|).
struct LargestMagnitude {
  static constexpr Tuning kTuning = tuning::kRange;
  const float* x;
  uint64_t n;
  bool vectors;
  uint32_t* largest;

  template <class Block>
  GW_DEVICE void operator()(Block& block) const {
    typename Block::template PerThread<uint32_t> most(block);
    block.Phase([&](uint32_t thread) {
      uint32_t bits = 0;
      ForEachStrided<kTuning.threads>(block, thread, x, {.stride = 1, .size = n}, vectors, [&](float v) {
        const uint32_t magnitude = FloatBits(v) & 0x7FFFFFFFu;
        bits = magnitude > bits ? magnitude : bits;
      });
      most[thread] = bits;
    });
    const uint32_t bits = block.Max(most);
    block.Final([&](uint32_t thread) {
      if (thread == 0) AtomicMax(largest, bits);
    });
  }
};

// largest[r] = bits of the largest |x| of run r: a block per run.
struct LargestOfRuns {
  static constexpr Tuning kTuning = tuning::kRange;
  const RunPlace* runs;
  uint32_t* largest;

  template <class Block>
  GW_DEVICE void operator()(Block& block) const {
    typename Block::template PerThread<uint32_t> most(block);
    const RunPlace run = runs[block.index()];
    block.Phase([&](uint32_t thread) {
      uint32_t bits = 0;
      for (uint32_t i = thread; i < run.length; i += kTuning.threads) {
        const uint32_t magnitude = FloatBits(run.x[i]) & 0x7FFFFFFFu;
        bits = magnitude > bits ? magnitude : bits;
      }
      most[thread] = bits;
    });
    const uint32_t bits = block.Max(most);
    block.Final([&](uint32_t thread) {
      if (thread == 0) largest[block.index()] = bits;
    });
  }
};

// Counts non-zero elements of a sample, or all, by the upper bits of their key, or (kLower) by the lower bits those
// whose upper bits are `upper`. A block counts in shared memory, in 32 bits: the launcher gives it fewer than 2^32
// elements.
template <bool kLower>
struct Histogram {
  static constexpr Tuning kTuning = tuning::kHistogram;
  static constexpr uint32_t kBins = 1u << (kLower ? kLowerBits : kUpperBits);
  static constexpr uint32_t kCounters = kBins * tuning::kHistogramCopies;
  const float* x;
  LineSample sample;
  bool vectors;
  uint32_t upper;
  const DeviceSelection* selection;  // if not null: `upper` is taken from it
  uint64_t* bins;

  template <class Block>
  GW_DEVICE void operator()(Block& block) const {
    uint32_t* counters = block.template Shared<uint32_t>();
    block.Phase([&](uint32_t thread) {
      for (uint32_t i = thread; i < kCounters; i += kTuning.threads) counters[i] = 0;
    });
    block.Phase([&](uint32_t thread) {
      const uint32_t wanted_upper = kLower && selection != nullptr ? selection->upper : upper;
      uint32_t* mine = counters + (thread % tuning::kHistogramCopies) * kBins;
      ForEachStrided<kTuning.threads>(block, thread, x, sample, vectors, [&](float v) {
        const uint32_t key = KeyOf(v);
        if constexpr (kLower) {
          if ((key >> kLowerBits) != wanted_upper || v == 0.0f) return;
          AtomicAdd(&mine[key & (kBins - 1)], 1u);
        } else {
          if (v != 0.0f) AtomicAdd(&mine[key >> kLowerBits], 1u);
        }
      });
    });
    block.Final([&](uint32_t thread) {
      for (uint32_t i = thread; i < kBins; i += kTuning.threads) {
        uint64_t sum = 0;
        for (uint32_t c = 0; c < tuning::kHistogramCopies; ++c) sum += counters[c * kBins + i];
        if (sum != 0) AtomicAdd(&bins[i], sum);
      }
    });
  }
};

// Finds the bin in which the number of elements from the highest bin down reaches what is wanted; one block. The sums
// of integers are exact in float64, so the result is that of walking down bin by bin.
template <bool kLower>
struct PickBin {
  static constexpr Tuning kTuning = tuning::kPickBin;
  static constexpr uint32_t kBins = Histogram<kLower>::kBins;
  static constexpr uint32_t kPerThread = kBins / kTuning.threads;
  static_assert(kPerThread * kTuning.threads == kBins);
  const uint64_t* bins;
  double wanted;  // upper: of the elements that were counted. Not used for lower.
  DeviceSelection* selection;

  struct Candidate {
    bool found;
    DeviceSelection selection;
  };

  template <class Block>
  GW_DEVICE void operator()(Block& block) const {
    typename Block::template PerThread<uint64_t> above(block);
    block.Phase([&](uint32_t thread) {
      uint64_t sum = 0;
      for (uint32_t i = 0; i < kPerThread; ++i) sum += bins[kBins - 1 - (thread * kPerThread + i)];
      above[thread] = sum;
    });
    const uint64_t present = block.ExclusiveSum(above);
    const double want = kLower ? selection->wanted : wanted;
    if (kLower && !(want > 0)) return;
    if (!kLower && (!(want > 0) || static_cast<double>(present) <= want)) {
      const bool all = want > 0;
      block.Final([&](uint32_t thread) {
        if (thread == 0) *selection = {all ? 0u : (1u << kKeyBits) - 1, 0, all ? uint64_t{1} << 32 : 0, 0.0};
      });
      return;
    }
    typename Block::template PerThread<Candidate> found(block);
    block.Phase([&](uint32_t thread) {
      found[thread].found = false;
      uint64_t higher = above[thread];
      for (uint32_t i = 0; i < kPerThread; ++i) {
        const uint32_t bin = kBins - 1 - (thread * kPerThread + i);
        const uint64_t count = bins[bin];
        const double left = want - static_cast<double>(higher);
        if (left > 0 && static_cast<double>(count) >= left) {
          if constexpr (kLower) {
            const uint32_t upper = selection->upper;
            found[thread] = {true, {(upper << kLowerBits) | bin, upper, ShareOfTies(left, count), 0.0}};
          } else {
            found[thread] = {true, {0, bin, 0, left}};
          }
          return;
        }
        higher += count;
      }
    });
    block.Final([&](uint32_t thread) {
      if (found[thread].found) *selection = found[thread].selection;
    });
  }
};

// Makes the state of `count` tiles ready for one grid of Take.
template <class Tiles>
struct InitTiles {
  static constexpr Tuning kTuning = tuning::kElementwise;
  Tiles tiles;
  uint32_t count;

  template <class Block>
  GW_DEVICE void operator()(Block& block) const {
    block.InitTiles(tiles, count);
  }
};

// What one tile of Take looks at.
struct TakeTile {
  float* x;
  uint64_t n;      // elements of x
  uint64_t begin;  // the tile's first element
  bool vectors;    // x is aligned for them
  uint32_t key;
  uint64_t keep_below;
  uint32_t phase;
  uint64_t first_element;
  float inverse;
  float unit;
  uint32_t first_position;

  // Takes key and keep_below from there, if it is not null.
  GW_DEVICE void SelectBy(const DeviceSelection* selection) {
    if (selection == nullptr) return;
    key = selection->key;
    keep_below = selection->keep_below;
  }
};

inline constexpr uint64_t kTakeTile = uint64_t{tuning::kTake.threads} * tuning::kTakeWords * 32;

// Tiles of one array.
struct OneArray {
  TakeTile first;
  const DeviceSelection* selection;

  GW_DEVICE TakeTile TileOf(uint64_t index) const {
    TakeTile tile = first;
    tile.begin = index * kTakeTile;
    tile.SelectBy(selection);
    return tile;
  }
};

// As many tiles of each run as the longest has: none holds elements of two runs.
struct ManyRuns {
  const RunPlace* runs;
  uint32_t tiles;  // of a run

  GW_DEVICE TakeTile TileOf(uint64_t index) const {
    const RunPlace& run = runs[index / tiles];
    TakeTile tile = {run.x,
                     run.length,
                     index % tiles * kTakeTile,
                     IsAligned<float, 4>(run.x),
                     run.key,
                     run.keep_below,
                     run.phase,
                     run.first_element,
                     1.0f / run.unit,
                     run.unit,
                     run.position};
    tile.SelectBy(run.selection);
    return tile;
  }
};

// TakeSelected in one pass over tiles of consecutive elements. A tile marks in shared memory, a bit each, what is
// taken; makes a list of it; learns from the tiles before it where its elements go; and writes them, neighbours in the
// list by neighbouring threads. Few elements are taken: reading those again, from a cache, is less than holding all of
// a tile. Tiles: what Block::TilePrefix needs. Source: OneArray or ManyRuns.
template <class Tiles, class Source>
struct Take {
  static constexpr Tuning kTuning = tuning::kTake;
  static constexpr uint32_t kLanes = 4;
  static constexpr uint32_t kWordBits = 32;
  static constexpr uint32_t kWords = tuning::kTakeWords;  // of marks, per thread
  static constexpr uint32_t kStretch = kWords * kWordBits;
  static constexpr uint32_t kBatch = kTuning.per_thread;  // vectors that a thread loads before it looks at them
  static constexpr uint32_t kBatches = kStretch / kLanes / kBatch;
  static_assert(kBatches * kBatch * kLanes == kStretch && kWordBits % kLanes == 0);
  static_assert(kTakeTile == uint64_t{kTuning.threads} * kStretch);
  static_assert(kTakeTile <= 1 << 16, "the list holds places within the tile");

  Source source;
  float limit;
  uint32_t* positions;
  int32_t* integers;
  uint64_t* taken;
  Tiles tiles;

  static uint64_t SharedBytes() { return kTakeTile / 8 + kTakeTile * sizeof(uint16_t); }  // the marks, then the list

  GW_DEVICE int32_t Quantized(const TakeTile& tile, float v, float* rest) const {
    return QuantizeOne(v, tile.inverse, tile.unit, limit, rest);
  }

  // Sets the bits of this thread's vectors, which lie beside its neighbours', so that loads are coalesced.
  GW_DEVICE void Mark(const TakeTile& tile, uint32_t thread, uint32_t* marks) const {
    for (uint32_t batch = 0; batch < kBatches; ++batch) {
      Vector<float, kLanes> v[kBatch];
      const uint32_t first = (kTuning.threads * kBatch * batch + thread) * kLanes;
      if (tile.begin + kTuning.threads * kBatch * kLanes * batch >= tile.n) return;  // for all threads
      GW_UNROLL
      for (uint32_t row = 0; row < kBatch; ++row) {
        const uint64_t i = tile.begin + first + kTuning.threads * kLanes * row;
        if (tile.vectors && i + kLanes <= tile.n) {
          v[row] = Load<float, kLanes>(tile.x, i);
        } else {
          GW_UNROLL
          for (uint32_t k = 0; k < kLanes; ++k) v[row].v[k] = i + k < tile.n ? tile.x[i + k] : 0.0f;
        }
      }
      GW_UNROLL
      for (uint32_t row = 0; row < kBatch; ++row) {
        const uint32_t at = first + kTuning.threads * kLanes * row;
        uint32_t bits = 0;
        GW_UNROLL
        for (uint32_t k = 0; k < kLanes; ++k) {
          if (KeyOf(v[row].v[k]) >= tile.key)
            bits |= static_cast<uint32_t>(Takes(tile, v[row].v[k], tile.begin + at + k)) << k;
        }
        if (bits != 0) AtomicAdd(&marks[at / kWordBits], bits << at % kWordBits);
      }
    }
  }

  GW_DEVICE bool Takes(const TakeTile& tile, float v, uint64_t i) const {
    float rest;
    return IsSelected(v, tile.key, tile.keep_below, tile.first_element + i, tile.phase) &&
           Quantized(tile, v, &rest) != 0;
  }

  // Writes this thread's stretch of the marks to the list, from `at` on.
  static GW_DEVICE void List(uint32_t thread, const uint32_t* marks, uint32_t at, uint16_t* list) {
    GW_UNROLL
    for (uint32_t word = thread * kWords; word < (thread + 1) * kWords; ++word) {
      for (uint32_t left = marks[word]; left != 0; left &= left - 1)
        list[at++] = static_cast<uint16_t>(word * kWordBits + LowestBit(left));
    }
  }

  template <class Block>
  GW_DEVICE void operator()(Block& block) const {
    const TakeTile tile = source.TileOf(block.index());
    uint32_t* const marks = block.template Shared<uint32_t>();
    uint16_t* const list = reinterpret_cast<uint16_t*>(marks + kTakeTile / kWordBits);
    typename Block::template PerThread<uint32_t> before(block);
    block.Phase([&](uint32_t thread) {
      GW_UNROLL
      for (uint32_t word = 0; word < kWords; ++word) marks[kTuning.threads * word + thread] = 0;
    });
    block.Phase([&](uint32_t thread) { Mark(tile, thread, marks); });
    block.Phase([&](uint32_t thread) {
      before[thread] = 0;
      GW_UNROLL
      for (uint32_t word = 0; word < kWords; ++word) before[thread] += CountBits(marks[thread * kWords + word]);
    });
    const uint32_t total = block.ExclusiveSum(before);
    block.Phase([&](uint32_t thread) { List(thread, marks, before[thread], list); });
    const uint32_t base = block.TilePrefix(tiles, total);
    block.Final([&](uint32_t thread) {
      for (uint32_t j = thread; j < total; j += kTuning.threads) {
        const uint64_t i = tile.begin + list[j];
        float rest;
        integers[base + j] = Quantized(tile, tile.x[i], &rest);
        positions[base + j] = tile.first_position + static_cast<uint32_t>(i);
        tile.x[i] = rest;
      }
      if (thread == 0 && block.index() + 1 == block.count()) *taken = base + total;
    });
  }
};

}  // namespace gradwire::kernels::cuda

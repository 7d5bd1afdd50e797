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

// largest[r] = bits of the largest |x| of run first_run + r: a block per run. x[0] is the first element of first_run.
struct LargestOfRuns {
  static constexpr Tuning kTuning = tuning::kRange;
  const float* x;
  const uint64_t* begin;  // RunScales::begin
  uint32_t first_run;
  uint32_t* largest;

  template <class Block>
  GW_DEVICE void operator()(Block& block) const {
    typename Block::template PerThread<uint32_t> most(block);
    const uint64_t run = first_run + block.index();
    const uint64_t end = begin[run + 1] - begin[first_run];
    block.Phase([&](uint32_t thread) {
      uint32_t bits = 0;
      for (uint64_t i = begin[run] - begin[first_run] + thread; i < end; i += kTuning.threads) {
        const uint32_t magnitude = FloatBits(x[i]) & 0x7FFFFFFFu;
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

// TakeSelected in one pass: every tile counts, learns from the tiles before it where its elements go, and writes them.
// Tiles: what Block::TilePrefix needs.
template <class Tiles>
struct Take {
  static constexpr Tuning kTuning = tuning::kTake;
  static constexpr int kLanes = 4;
  static constexpr int kRows = kTuning.per_thread;
  static constexpr uint64_t kTile = uint64_t{kTuning.threads} * kRows * kLanes;
  static_assert(kRows <= 4 && kTuning.threads * kLanes < (1 << 16), "a row's count has 16 bits of 64");

  float* x;
  uint64_t n;
  bool vectors;
  uint32_t key;
  uint64_t keep_below;
  uint32_t phase;
  uint64_t first_element;
  float inverse;
  float unit;
  float limit;
  const DeviceSelection* selection;  // if not null: key and keep_below are taken from it
  RunScales scales;                  // if there are runs: unit and inverse are taken from the run of the position
  const uint64_t* start;             // if not null: where the first element goes; else 0
  uint32_t first_position;
  uint32_t* positions;
  int32_t* integers;
  uint64_t* taken;
  Tiles tiles;

  // QuantizeOne of element i.
  GW_DEVICE int32_t Quantized(float v, uint64_t i, float* rest) const {
    if (scales.runs == 0) return QuantizeOne(v, inverse, unit, limit, rest);
    const float scale = scales.unit[RunOf(scales, first_position + i)];
    return QuantizeOne(v, 1.0f / scale, scale, limit, rest);
  }

  // The elements of one thread: kLanes of each row. A bit of `takes` for each that is taken.
  struct Mine {
    float x[kRows * kLanes];
    uint32_t takes;
  };

  GW_DEVICE uint64_t First(uint64_t tile, int row, uint32_t thread) const {
    return tile * kTile + (uint64_t{kTuning.threads} * row + thread) * kLanes;
  }

  // Counts of the rows, 16 bits each.
  GW_DEVICE uint64_t Choose(uint64_t tile, uint32_t thread, Mine* mine) const {
    const uint32_t least = selection != nullptr ? selection->key : key;
    const uint64_t below = selection != nullptr ? selection->keep_below : keep_below;
    GW_UNROLL
    for (int row = 0; row < kRows; ++row) {
      const uint64_t i = First(tile, row, thread);
      if (vectors && i + kLanes <= n) {
        const Vector<float, kLanes> v = Load<float, kLanes>(x, i);
        GW_UNROLL
        for (int k = 0; k < kLanes; ++k) mine->x[row * kLanes + k] = v.v[k];
      } else {
        GW_UNROLL
        for (int k = 0; k < kLanes; ++k) mine->x[row * kLanes + k] = i + k < n ? x[i + k] : 0.0f;
      }
    }
    mine->takes = 0;
    uint64_t counts = 0;
    GW_UNROLL
    for (int j = 0; j < kRows * kLanes; ++j) {
      const float v = mine->x[j];
      if (KeyOf(v) < least) continue;
      const uint64_t i = First(tile, j / kLanes, thread) + j % kLanes;
      float rest;
      if (IsSelected(v, least, below, first_element + i, phase) && Quantized(v, i, &rest) != 0) {
        mine->takes |= 1u << j;
        counts += uint64_t{1} << (16 * (j / kLanes));
      }
    }
    return counts;
  }

  GW_DEVICE void Write(uint64_t tile, uint32_t thread, const Mine& mine, uint32_t at, int row) const {
    GW_UNROLL
    for (int k = 0; k < kLanes; ++k) {
      if ((mine.takes >> (row * kLanes + k) & 1) == 0) continue;
      const uint64_t i = First(tile, row, thread) + k;
      float rest;
      integers[at] = Quantized(mine.x[row * kLanes + k], i, &rest);
      positions[at] = first_position + static_cast<uint32_t>(i);
      x[i] = rest;
      ++at;
    }
  }

  template <class Block>
  GW_DEVICE void operator()(Block& block) const {
    const uint64_t tile = block.index();
    typename Block::template PerThread<Mine> mine(block);
    typename Block::template PerThread<uint64_t> before(block);
    block.Phase([&](uint32_t thread) { before[thread] = Choose(tile, thread, &mine[thread]); });
    const uint64_t totals = block.ExclusiveSum(before);
    uint32_t total = 0;
    for (int row = 0; row < kRows; ++row) total += static_cast<uint32_t>(totals >> (16 * row)) & 0xFFFFu;
    const uint32_t base = block.TilePrefix(tiles, total) + (start != nullptr ? static_cast<uint32_t>(*start) : 0);
    block.Final([&](uint32_t thread) {
      uint32_t at = base;
      GW_UNROLL
      for (int row = 0; row < kRows; ++row) {
        Write(tile, thread, mine[thread], at + (static_cast<uint32_t>(before[thread] >> (16 * row)) & 0xFFFFu), row);
        at += static_cast<uint32_t>(totals >> (16 * row)) & 0xFFFFu;
      }
      if (thread == 0 && tile + 1 == block.count()) *taken = at;
    });
  }
};

}  // namespace gradwire::kernels::cuda

// The frame of every kernel that treats elements on their own, with the vector path and the ragged or unaligned one.
#pragma once

#include "kernels/cuda/bodies/block.cuh"
#include "kernels/cuda/device_values.h"
#include "kernels/cuda/tuning.h"

namespace gradwire::kernels::cuda {

// Op: `template <int N> GW_DEVICE void Run(uint64_t i) const` treats elements i .. i + N - 1; kLanes is the N of the
// vector path. `vectors`: every operand is aligned for it.
template <class Op>
struct Elementwise {
  static constexpr Tuning kTuning = tuning::kElementwise;
  static constexpr uint64_t kTile = uint64_t{kTuning.threads} * kTuning.per_thread * Op::kLanes;
  Op op;
  uint64_t n = 0;
  bool vectors = false;

  template <class Block>
  GW_DEVICE void operator()(Block& block) const {
    block.Final([&](uint32_t thread) {
      const uint64_t tile = block.index() * kTile;
      if (vectors) {
        GW_UNROLL
        for (uint32_t row = 0; row < kTuning.per_thread; ++row) {
          const uint64_t i = tile + (uint64_t{kTuning.threads} * row + thread) * Op::kLanes;
          if (i + Op::kLanes <= n) {
            op.template Run<Op::kLanes>(i);
          } else {
            for (uint64_t j = i; j < n; ++j) op.template Run<1>(j);
          }
        }
      } else {
        for (uint32_t row = 0; row < kTuning.per_thread * Op::kLanes; ++row) {
          const uint64_t i = tile + uint64_t{kTuning.threads} * row + thread;
          if (i < n) op.template Run<1>(i);
        }
      }
    });
  }
};

// The same where neighbours in the list are not neighbours in memory; the number of elements may be the device's.
template <class Op>
struct Scattered {
  static constexpr Tuning kTuning = tuning::kScatter;
  static constexpr uint64_t kTile = uint64_t{kTuning.threads} * kTuning.per_thread;
  Op op;
  ElementCount count;

  template <class Block>
  GW_DEVICE void operator()(Block& block) const {
    block.Final([&](uint32_t thread) {
      const uint64_t n = count.get();
      GW_UNROLL
      for (uint32_t row = 0; row < kTuning.per_thread; ++row) {
        const uint64_t i = block.index() * kTile + uint64_t{kTuning.threads} * row + thread;
        if (i < n) op.Run(i);
      }
    });
  }
};

// The same for the runs of a bucket, of each of which blocks take as many tiles as the longest has. Op: `void Run(const
// RunPlace& run, uint32_t i) const` treats element i of the run.
template <class Op>
struct EachOfRuns {
  static constexpr Tuning kTuning = tuning::kElementwise;
  static constexpr uint32_t kTile = 4096;
  Op op;
  const RunPlace* runs;
  uint32_t tiles;  // of a run

  template <class Block>
  GW_DEVICE void operator()(Block& block) const {
    const RunPlace run = runs[block.index() / tiles];
    const uint32_t begin = static_cast<uint32_t>(block.index() % tiles) * kTile;
    const uint32_t end = begin + kTile < run.length ? begin + kTile : run.length;
    block.Final([&](uint32_t thread) {
      for (uint32_t i = begin + thread; i < end; i += kTuning.threads) op.Run(run, i);
    });
  }
};

}  // namespace gradwire::kernels::cuda

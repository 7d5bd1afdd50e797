// One tuning struct per kernel: threads of a block, and what each thread or block takes at once. None of them changes a
// result. Most values are chosen by reasoning, not by measurement (README.md).
#pragma once

#include <cstdint>

namespace gradwire::kernels::cuda {

struct Tuning {
  uint32_t threads = 256;        // of a block
  uint32_t per_thread = 1;       // elements, or vectors of them, of one thread
  uint32_t min_blocks = 1;       // resident on one multiprocessor: bounds the registers
  uint32_t blocks_per_unit = 0;  // of a grid that strides over its input: blocks per multiprocessor
};

namespace tuning {

// Element-wise kernels: 8 blocks of 256 threads fill a multiprocessor; a 16-byte access per operand and thread.
inline constexpr Tuning kElementwise = {.threads = 256, .per_thread = 2, .min_blocks = 6};
inline constexpr Tuning kScatter = {.threads = 256, .per_thread = 4, .min_blocks = 6};
inline constexpr Tuning kRange = {.threads = 256, .per_thread = 1, .min_blocks = 4, .blocks_per_unit = 8};

// Histograms: kHistogramCopies of the bins per block, so that neighbours with like magnitudes collide less.
inline constexpr Tuning kHistogram = {.threads = 512, .per_thread = 1, .min_blocks = 3, .blocks_per_unit = 3};
inline constexpr int kHistogramCopies = 2;
inline constexpr Tuning kPickBin = {.threads = 512};

// Selection: a tile is threads * kTakeWords * 32 elements; a thread has per_thread 16-byte loads under way.
inline constexpr Tuning kTake = {.threads = 256, .per_thread = 4, .min_blocks = 6};
inline constexpr uint32_t kTakeWords = 2;

// Peeling: counting and scattering elements by group, then one block per group.
inline constexpr Tuning kGroup = {.threads = 256, .per_thread = 8, .min_blocks = 4};
inline constexpr uint32_t kSharedGroups = 4096;  // up to here, a block counts its elements per group in shared memory
inline constexpr Tuning kGroupScan = {.threads = 1024};
inline constexpr Tuning kPeel = {.threads = 1024, .per_thread = 1, .min_blocks = 1};
inline constexpr uint64_t kWideScratchBytes = uint64_t{64} << 20;  // for groups that shared memory cannot hold

}  // namespace tuning
}  // namespace gradwire::kernels::cuda

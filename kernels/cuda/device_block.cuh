// The thread block of a GPU, as bodies/block.cuh wants it. Collectives are CUB's.
#pragma once

#include <cub/agent/single_pass_scan_operators.cuh>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "kernels/cuda/bodies/block.cuh"

namespace gradwire::kernels::cuda {

struct Plus {
  template <class T>
  __device__ __forceinline__ T operator()(const T& a, const T& b) const {
    return a + b;
  }
};

struct Larger {
  __device__ __forceinline__ uint32_t operator()(uint32_t a, uint32_t b) const { return a > b ? a : b; }
};

// Running totals of the tiles of a grid (decoupled look-back: Merrill and Garland 2016, "Single-pass Parallel Prefix
// Scan with Decoupled Look-back").
using DeviceTiles = cub::ScanTileState<uint32_t>;

template <int kThreads>
class DeviceBlock {
 public:
  template <class T>
  class PerThread {
   public:
    __device__ __forceinline__ explicit PerThread(const DeviceBlock&) {}
    __device__ __forceinline__ T& operator[](uint32_t) { return value_; }

   private:
    T value_;
  };

  __device__ __forceinline__ uint64_t index() const { return blockIdx.x; }
  __device__ __forceinline__ uint64_t count() const { return gridDim.x; }

  template <class F>
  __device__ __forceinline__ void Phase(F f) {
    f(threadIdx.x);
    __syncthreads();
  }
  template <class F>
  __device__ __forceinline__ void Final(F f) {
    f(threadIdx.x);
  }

  template <class T>
  __device__ __forceinline__ T* Shared() {
    extern __shared__ uint4 gradwire_shared[];
    return reinterpret_cast<T*>(gradwire_shared);
  }

  template <class T>
  __device__ __forceinline__ T ExclusiveSum(PerThread<T>& values) {
    using Scan = cub::BlockScan<T, kThreads>;
    __shared__ typename Scan::TempStorage storage;
    T total;
    Scan(storage).ExclusiveSum(values[0], values[0], total);
    __syncthreads();
    return total;
  }

  __device__ __forceinline__ uint32_t Max(PerThread<uint32_t>& values) {
    using Reduce = cub::BlockReduce<uint32_t, kThreads>;
    __shared__ typename Reduce::TempStorage storage;
    __shared__ uint32_t result;
    const uint32_t most = Reduce(storage).Reduce(values[0], Larger());
    if (threadIdx.x == 0) result = most;
    __syncthreads();
    return result;
  }

  // Publishes this block's total; returns the sum of the totals of all blocks before it. The grid is one-dimensional,
  // one block per tile; `tiles` were initialised by InitTiles. Blocks start in order, so none waits for one that
  // cannot.
  __device__ __forceinline__ uint32_t TilePrefix(DeviceTiles tiles, uint32_t total) {
    using Prefix = cub::TilePrefixCallbackOp<uint32_t, Plus, DeviceTiles>;
    __shared__ typename Prefix::TempStorage storage;
    __shared__ uint32_t before;
    const int tile = static_cast<int>(blockIdx.x);
    if (tile == 0) {
      if (threadIdx.x == 0) {
        tiles.SetInclusive(0, total);
        before = 0;
      }
    } else if (threadIdx.x < 32) {
      Prefix prefix(tiles, storage, Plus(), tile);
      const uint32_t sum = prefix(total);
      if (threadIdx.x == 0) before = sum;
    }
    __syncthreads();
    return before;
  }

  static __device__ __forceinline__ void InitTiles(DeviceTiles tiles, uint32_t n) {
    tiles.InitializeStatus(static_cast<int>(n));
  }
};

}  // namespace gradwire::kernels::cuda

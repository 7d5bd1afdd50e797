// What kernel bodies are written against, so that one text runs on a GPU and, block by block, on the host (tests).
// A kernel is a trivially copyable struct: its arguments are its members and
//   static constexpr Tuning kTuning;
//   template <class Block> GW_DEVICE void operator()(Block& block) const;
// Block is the thread block: gradwire::kernels::cuda::DeviceBlock (device_block.cuh) or the tests' HostBlock. It offers
//   index(), count()              this block and how many the grid has
//   Phase(f), Final(f)            f(thread) on every thread; Phase ends with a barrier, Final must be the last
//   PerThread<T>                  a register of each thread that outlives a phase: v[thread]
//   Shared<T>()                   the dynamic shared memory, 16-byte aligned, uninitialised
//   ExclusiveSum(PerThread<T>&)   replaces each thread's value by the sum of those before it; returns the total
//   Max(PerThread<uint32_t>&)     the largest value, on every thread
//   TilePrefix(tiles, total, ..)  see DeviceBlock
// Between phases, code runs on every thread and must be uniform over the block: what it reads, the phase before may
// have written, but not the one after. Within a phase threads run in any order: what one writes another may not read,
// except through the atomics below, whose results must not depend on order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/math/math.h"

#if defined(__CUDACC__)
#define GW_DEVICE __device__ __forceinline__
#define GW_HOST_DEVICE __host__ __device__ __forceinline__
#define GW_UNROLL _Pragma("unroll")
#else
#include <atomic>
#include <bit>
#define GW_DEVICE inline
#define GW_HOST_DEVICE inline
#define GW_UNROLL
#endif

namespace gradwire::kernels::cuda {

// N values, accessed as one word of up to 16 bytes.
template <class T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Vector {
  T v[N];
};

// Elements i .. i + N - 1 of an array of T. N == 1: `base` of any alignment; else aligned to the vector (IsAligned).
template <class T, int N>
GW_DEVICE Vector<T, N> Load(const void* base, uint64_t i) {
  const char* from = static_cast<const char*>(base) + i * sizeof(T);
#if defined(__CUDACC__)
  if constexpr (N > 1) return *reinterpret_cast<const Vector<T, N>*>(from);
#endif
  Vector<T, N> out;
  memcpy(&out, from, sizeof(out));
  return out;
}

template <class T, int N>
GW_DEVICE void Store(void* base, uint64_t i, const Vector<T, N>& value) {
  char* to = static_cast<char*>(base) + i * sizeof(T);
#if defined(__CUDACC__)
  if constexpr (N > 1) {
    *reinterpret_cast<Vector<T, N>*>(to) = value;
    return;
  }
#endif
  memcpy(to, &value, sizeof(value));
}

// The same for arrays of T that are aligned to T: single elements are read and written as such.
template <int N, class T>
GW_DEVICE Vector<T, N> LoadTyped(const T* base, uint64_t i) {
  if constexpr (N == 1) {
    return {{base[i]}};
  } else {
    return Load<T, N>(base, i);
  }
}

template <int N, class T>
GW_DEVICE void StoreTyped(T* base, uint64_t i, const Vector<T, N>& value) {
  if constexpr (N == 1) {
    base[i] = value.v[0];
  } else {
    Store<T, N>(base, i, value);
  }
}

// One element of an array of T of any alignment; `aligned`: it is aligned to T, so that one access suffices.
template <class T>
GW_DEVICE T LoadOne(const void* base, uint64_t i, bool aligned) {
  const char* from = static_cast<const char*>(base) + i * sizeof(T);
  T value;
  if (aligned) {
    memcpy(&value, __builtin_assume_aligned(from, sizeof(T)), sizeof(T));
  } else {
    memcpy(&value, from, sizeof(T));
  }
  return value;
}

template <class T>
GW_DEVICE void StoreOne(void* base, uint64_t i, T value, bool aligned) {
  char* to = static_cast<char*>(base) + i * sizeof(T);
  if (aligned) {
    memcpy(__builtin_assume_aligned(to, sizeof(T)), &value, sizeof(T));
  } else {
    memcpy(to, &value, sizeof(T));
  }
}

// Whether Load and Store of N elements of T at multiples of N are aligned.
template <class T, int N>
GW_HD bool IsAligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % alignof(Vector<T, N>) == 0;
}

// Relaxed atomics on integers; each returns the value before. LowestBit: the position of the lowest set bit of v != 0.
#if defined(__CUDACC__)
GW_DEVICE uint32_t LowestBit(uint32_t v) { return static_cast<uint32_t>(__ffs(static_cast<int>(v))) - 1; }
GW_DEVICE uint32_t CountBits(uint32_t v) { return static_cast<uint32_t>(__popc(v)); }
GW_DEVICE uint32_t AtomicAdd(uint32_t* p, uint32_t v) { return atomicAdd(p, v); }
GW_DEVICE uint64_t AtomicAdd(uint64_t* p, uint64_t v) {
  return atomicAdd(reinterpret_cast<unsigned long long*>(p), static_cast<unsigned long long>(v));
}
GW_DEVICE void AtomicMin(uint64_t* p, uint64_t v) {
  atomicMin(reinterpret_cast<unsigned long long*>(p), static_cast<unsigned long long>(v));
}
GW_DEVICE void AtomicMax(uint32_t* p, uint32_t v) { atomicMax(p, v); }
#else
inline uint32_t LowestBit(uint32_t v) { return static_cast<uint32_t>(std::countr_zero(v)); }
inline uint32_t CountBits(uint32_t v) { return static_cast<uint32_t>(std::popcount(v)); }
template <class T>
inline T AtomicAdd(T* p, T v) {
  return std::atomic_ref<T>(*p).fetch_add(v, std::memory_order_relaxed);
}
template <class T>
inline void AtomicMin(T* p, T v) {
  std::atomic_ref<T> at(*p);
  T seen = at.load(std::memory_order_relaxed);
  while (v < seen && !at.compare_exchange_weak(seen, v, std::memory_order_relaxed)) {
  }
}
template <class T>
inline void AtomicMax(T* p, T v) {
  std::atomic_ref<T> at(*p);
  T seen = at.load(std::memory_order_relaxed);
  while (v > seen && !at.compare_exchange_weak(seen, v, std::memory_order_relaxed)) {
  }
}
#endif

}  // namespace gradwire::kernels::cuda

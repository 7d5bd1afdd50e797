// Dense merging, fixed point and bfloat16, element by element. Contracts: kernels/backend.h.
#pragma once

#include "kernels/cuda/bodies/lanes.cuh"
#include "kernels/cuda/device_values.h"
#include "kernels/math/grid.h"

namespace gradwire::kernels::cuda {

// T: int8_t, int16_t, int32_t. `sign`: 1 or 2^32 - 1; unsigned arithmetic wraps.
template <class T>
struct AddIntegersOp {
  static constexpr int kLanes = 4;
  Typed<int32_t> acc;
  Packed<T> values;
  uint32_t sign;

  bool aligned() const { return AllAligned<kLanes>(acc, values); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    EachLane<N>(
        i,
        [&](int, int32_t& a, T b) {
          a = static_cast<int32_t>(static_cast<uint32_t>(a) + sign * static_cast<uint32_t>(b));
        },
        acc, values);
  }
};

template <class T>
struct AssignIntegersOp {
  static constexpr int kLanes = 4;
  Out<Typed<int32_t>> acc;
  Packed<T> values;

  bool aligned() const { return AllAligned<kLanes>(acc, values); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    EachLane<N>(
        i, [&](int, int32_t& a, T b) { a = b; }, acc, values);
  }
};

GW_DEVICE uint32_t ToFloatBits(uint32_t bits) { return bits; }
GW_DEVICE uint32_t ToFloatBits(uint16_t bf16) { return static_cast<uint32_t>(bf16) << 16; }

// T: the bits of a value, uint32_t (float32) or uint16_t (bfloat16). `flip`: 0 adds, ~0 subtracts.
template <class T>
struct AddFloatsOp {
  static constexpr int kLanes = 4;
  Typed<int64_t> acc;
  Packed<T> values;
  uint64_t flip;

  bool aligned() const { return AllAligned<kLanes>(acc, values); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    EachLane<N>(
        i,
        [&](int, int64_t& a, T b) {
          const uint64_t grid = ToGrid(FloatFromBits(ToFloatBits(b)));
          a = static_cast<int64_t>(static_cast<uint64_t>(a) + ((grid ^ flip) - flip));
        },
        acc, values);
  }
};

template <class T>
struct AssignFloatsOp {
  static constexpr int kLanes = 4;
  Out<Typed<int64_t>> acc;
  Packed<T> values;

  bool aligned() const { return AllAligned<kLanes>(acc, values); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    EachLane<N>(
        i, [&](int, int64_t& a, T b) { a = static_cast<int64_t>(ToGrid(FloatFromBits(ToFloatBits(b)))); }, acc, values);
  }
};

// The additions of AsyncBackend that check as they go. A bad value is reported as position << 32 | its bits.
// A float that is out of the grid counts as 0 in both directions, so that it can be taken back.
template <class T>
struct AddFloatsCheckedOp {
  static constexpr int kLanes = 4;
  Typed<int64_t> acc;
  Packed<T> values;
  uint64_t flip;
  uint32_t limit_bits;
  uint64_t first_position;
  uint64_t* first_bad;

  bool aligned() const { return AllAligned<kLanes>(acc, values); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    EachLane<N>(
        i,
        [&](int k, int64_t& a, T b) {
          const uint32_t bits = ToFloatBits(b);
          const bool bad = (bits & 0x7FFFFFFFu) >= limit_bits;
          if (bad) AtomicMin(first_bad, (first_position + i + static_cast<uint64_t>(k)) << 32 | bits);
          const uint64_t grid = bad ? 0 : ToGrid(FloatFromBits(bits));
          a = static_cast<int64_t>(static_cast<uint64_t>(a) + ((grid ^ flip) - flip));
        },
        acc, values);
  }
};

template <class T>
struct AddIntegersCheckedOp {
  static constexpr int kLanes = 4;
  Typed<int32_t> acc;
  Packed<T> values;
  uint32_t sign;
  int32_t limit;
  uint64_t first_position;
  uint64_t* first_bad;

  bool aligned() const { return AllAligned<kLanes>(acc, values); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    EachLane<N>(
        i,
        [&](int k, int32_t& a, T b) {
          const int32_t v = b;
          if (v > limit || v < -limit) {
            AtomicMin(first_bad, (first_position + i + static_cast<uint64_t>(k)) << 32 | static_cast<uint32_t>(v));
          }
          a = static_cast<int32_t>(static_cast<uint32_t>(a) + sign * static_cast<uint32_t>(v));
        },
        acc, values);
  }
};

// *first = min(*first, index of each value whose magnitude has bits >= limit).
template <class T>
struct FindMagnitudeOp {
  static constexpr int kLanes = 16 / sizeof(T);
  const uint8_t* values;
  uint32_t limit;
  uint64_t* first;

  bool aligned() const { return IsAligned<T, kLanes>(values); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    const Vector<T, N> x = Load<T, N>(values, i);
    int at = N;
    GW_UNROLL
    for (int k = N; k-- > 0;) {
      if ((ToFloatBits(x.v[k]) & 0x7FFFFFFFu) >= limit) at = k;
    }
    if (at < N) AtomicMin(first, i + static_cast<uint64_t>(at));
  }
};

struct GridToMeanOp {
  static constexpr int kLanes = 4;
  Typed<const int64_t> acc;
  Out<Typed<float>> out;
  float unit;
  float count;

  bool aligned() const { return AllAligned<kLanes>(acc, out); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    EachLane<N>(
        i, [&](int, int64_t a, float& mean) { mean = GridMean(a, unit, count); }, acc, out);
  }
};

template <class T>
struct QuantizeOp {
  static constexpr int kLanes = 4;
  Typed<float> x;
  Out<Packed<T, uint8_t>> q;
  float inverse;
  float unit;
  float limit;

  bool aligned() const { return AllAligned<kLanes>(x, q); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    EachLane<N>(
        i, [&](int, float& value, T& out) { out = static_cast<T>(QuantizeOne(value, inverse, unit, limit, &value)); },
        x, q);
  }
};

// The same, and the three after it, of all runs of a bucket (EachOfRuns).
template <class T>
struct QuantizeRunOp {
  T* out;
  float limit;

  GW_DEVICE void Run(const RunPlace& run, uint32_t i) const {
    T integer = 0;
    if (run.unit != 0.0f) integer = static_cast<T>(QuantizeOne(run.x[i], 1.0f / run.unit, run.unit, limit, &run.x[i]));
    out[run.position + i] = integer;
  }
};

struct SplitBf16RunOp {
  uint16_t* out;
  float largest;
  GW_DEVICE void Run(const RunPlace& run, uint32_t i) const {
    out[run.position + i] = SplitBf16(run.x[i], largest, &run.x[i]);
  }
};

struct CopyRunOp {
  float* out;
  GW_DEVICE void Run(const RunPlace& run, uint32_t i) const { out[run.position + i] = run.x[i]; }
};

struct CopyToRunOp {
  const float* from;
  GW_DEVICE void Run(const RunPlace& run, uint32_t i) const {
    if (run.x != nullptr) run.x[i] = from[run.position + i];
  }
};

template <class T>
struct DequantizeOp {
  static constexpr int kLanes = 4;
  Packed<T> q;
  Typed<float> x;
  float unit;

  bool aligned() const { return AllAligned<kLanes>(q, x); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    EachLane<N>(
        i, [&](int, T b, float& value) { value += static_cast<float>(b) * unit; }, q, x);
  }
};

struct SplitBf16Op {
  static constexpr int kLanes = 4;
  Typed<float> x;
  Out<Packed<uint16_t, uint8_t>> out;
  float largest;

  bool aligned() const { return AllAligned<kLanes>(x, out); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    EachLane<N>(
        i, [&](int, float& value, uint16_t& bits) { bits = SplitBf16(value, largest, &value); }, x, out);
  }
};

struct AddBf16Op {
  static constexpr int kLanes = 4;
  Packed<uint16_t> values;
  Typed<float> x;

  bool aligned() const { return AllAligned<kLanes>(values, x); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    EachLane<N>(
        i, [&](int, uint16_t bits, float& value) { value += Bf16ToFloat(bits); }, values, x);
  }
};

// T: uint8_t, uint16_t, uint32_t. `sign`: 1 or 2^32 - 1.
template <class T>
struct AddCellsOp {
  static constexpr int kLanes = 16 / sizeof(T);
  Packed<T, uint8_t> acc;
  Packed<T> cells;
  uint32_t sign;

  bool aligned() const { return AllAligned<kLanes>(acc, cells); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    EachLane<N>(
        i, [&](int, T& a, T b) { a = static_cast<T>(uint32_t{a} + sign * uint32_t{b}); }, acc, cells);
  }
};

}  // namespace gradwire::kernels::cuda

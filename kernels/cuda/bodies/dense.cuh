// Dense merging, fixed point and bfloat16, element by element. Contracts: kernels/backend.h.
#pragma once

#include "kernels/cuda/bodies/block.cuh"
#include "kernels/cuda/device_values.h"
#include "kernels/math/grid.h"

namespace gradwire::kernels::cuda {

// T: int8_t, int16_t, int32_t. `sign`: 1 or 2^32 - 1; unsigned arithmetic wraps.
template <class T>
struct AddIntegersOp {
  static constexpr int kLanes = 4;
  int32_t* acc;
  const uint8_t* values;
  uint32_t sign;

  bool aligned() const { return IsAligned<int32_t, kLanes>(acc) && IsAligned<T, kLanes>(values); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    Vector<int32_t, N> a = LoadTyped<N>(acc, i);
    const Vector<T, N> b = Load<T, N>(values, i);
    GW_UNROLL
    for (int k = 0; k < N; ++k) {
      a.v[k] = static_cast<int32_t>(static_cast<uint32_t>(a.v[k]) + sign * static_cast<uint32_t>(b.v[k]));
    }
    StoreTyped<N>(acc, i, a);
  }
};

template <class T>
struct AssignIntegersOp {
  static constexpr int kLanes = 4;
  int32_t* acc;
  const uint8_t* values;

  bool aligned() const { return IsAligned<int32_t, kLanes>(acc) && IsAligned<T, kLanes>(values); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    const Vector<T, N> b = Load<T, N>(values, i);
    Vector<int32_t, N> a;
    GW_UNROLL
    for (int k = 0; k < N; ++k) a.v[k] = b.v[k];
    StoreTyped<N>(acc, i, a);
  }
};

GW_DEVICE uint32_t ToFloatBits(uint32_t bits) { return bits; }
GW_DEVICE uint32_t ToFloatBits(uint16_t bf16) { return static_cast<uint32_t>(bf16) << 16; }

// T: the bits of a value, uint32_t (float32) or uint16_t (bfloat16). `flip`: 0 adds, ~0 subtracts.
template <class T>
struct AddFloatsOp {
  static constexpr int kLanes = 4;
  int64_t* acc;
  const uint8_t* values;
  uint64_t flip;

  bool aligned() const { return IsAligned<int64_t, kLanes>(acc) && IsAligned<T, kLanes>(values); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    Vector<int64_t, N> a = LoadTyped<N>(acc, i);
    const Vector<T, N> b = Load<T, N>(values, i);
    GW_UNROLL
    for (int k = 0; k < N; ++k) {
      const uint64_t grid = ToGrid(FloatFromBits(ToFloatBits(b.v[k])));
      a.v[k] = static_cast<int64_t>(static_cast<uint64_t>(a.v[k]) + ((grid ^ flip) - flip));
    }
    StoreTyped<N>(acc, i, a);
  }
};

template <class T>
struct AssignFloatsOp {
  static constexpr int kLanes = 4;
  int64_t* acc;
  const uint8_t* values;

  bool aligned() const { return IsAligned<int64_t, kLanes>(acc) && IsAligned<T, kLanes>(values); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    const Vector<T, N> b = Load<T, N>(values, i);
    Vector<int64_t, N> a;
    GW_UNROLL
    for (int k = 0; k < N; ++k) a.v[k] = static_cast<int64_t>(ToGrid(FloatFromBits(ToFloatBits(b.v[k]))));
    StoreTyped<N>(acc, i, a);
  }
};

// The additions of AsyncBackend that check as they go. A bad value is reported as position << 32 | its bits.
// A float that is out of the grid counts as 0 in both directions, so that it can be taken back.
template <class T>
struct AddFloatsCheckedOp {
  static constexpr int kLanes = 4;
  int64_t* acc;
  const uint8_t* values;
  uint64_t flip;
  uint32_t limit_bits;
  uint64_t first_position;
  uint64_t* first_bad;

  bool aligned() const { return IsAligned<int64_t, kLanes>(acc) && IsAligned<T, kLanes>(values); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    Vector<int64_t, N> a = LoadTyped<N>(acc, i);
    const Vector<T, N> b = Load<T, N>(values, i);
    GW_UNROLL
    for (int k = 0; k < N; ++k) {
      const uint32_t bits = ToFloatBits(b.v[k]);
      const bool bad = (bits & 0x7FFFFFFFu) >= limit_bits;
      if (bad) AtomicMin(first_bad, (first_position + i + static_cast<uint64_t>(k)) << 32 | bits);
      const uint64_t grid = bad ? 0 : ToGrid(FloatFromBits(bits));
      a.v[k] = static_cast<int64_t>(static_cast<uint64_t>(a.v[k]) + ((grid ^ flip) - flip));
    }
    StoreTyped<N>(acc, i, a);
  }
};

template <class T>
struct AddIntegersCheckedOp {
  static constexpr int kLanes = 4;
  int32_t* acc;
  const uint8_t* values;
  uint32_t sign;
  int32_t limit;
  uint64_t first_position;
  uint64_t* first_bad;

  bool aligned() const { return IsAligned<int32_t, kLanes>(acc) && IsAligned<T, kLanes>(values); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    Vector<int32_t, N> a = LoadTyped<N>(acc, i);
    const Vector<T, N> b = Load<T, N>(values, i);
    GW_UNROLL
    for (int k = 0; k < N; ++k) {
      const int32_t v = b.v[k];
      if (v > limit || v < -limit) {
        AtomicMin(first_bad, (first_position + i + static_cast<uint64_t>(k)) << 32 | static_cast<uint32_t>(v));
      }
      a.v[k] = static_cast<int32_t>(static_cast<uint32_t>(a.v[k]) + sign * static_cast<uint32_t>(v));
    }
    StoreTyped<N>(acc, i, a);
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
  const int64_t* acc;
  float* out;
  float unit;
  float count;

  bool aligned() const { return IsAligned<int64_t, kLanes>(acc) && IsAligned<float, kLanes>(out); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    const Vector<int64_t, N> a = LoadTyped<N>(acc, i);
    Vector<float, N> mean;
    GW_UNROLL
    for (int k = 0; k < N; ++k) mean.v[k] = GridMean(a.v[k], unit, count);
    StoreTyped<N>(out, i, mean);
  }
};

template <class T>
struct QuantizeOp {
  static constexpr int kLanes = 4;
  float* x;
  uint8_t* q;
  float inverse;
  float unit;
  float limit;

  bool aligned() const { return IsAligned<float, kLanes>(x) && IsAligned<T, kLanes>(q); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    Vector<float, N> v = LoadTyped<N>(x, i);
    Vector<T, N> out;
    GW_UNROLL
    for (int k = 0; k < N; ++k) out.v[k] = static_cast<T>(QuantizeOne(v.v[k], inverse, unit, limit, &v.v[k]));
    StoreTyped<N>(x, i, v);
    Store<T, N>(q, i, out);
  }
};

// The same with the unit of each element's run; element i is at first_position + i.
template <class T>
struct QuantizeRunsOp {
  static constexpr int kLanes = 4;
  float* x;
  uint8_t* q;
  RunScales scales;
  uint64_t first_position;
  float limit;

  bool aligned() const { return IsAligned<float, kLanes>(x) && IsAligned<T, kLanes>(q); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    Vector<float, N> v = LoadTyped<N>(x, i);
    Vector<T, N> out;
    const uint64_t position = first_position + i;
    uint32_t run = RunOf(scales, position);
    GW_UNROLL
    for (int k = 0; k < N; ++k) {
      if (position + static_cast<uint64_t>(k) >= scales.begin[run + 1]) ++run;
      const float unit = scales.unit[run];
      out.v[k] = unit == 0.0f ? T{0} : static_cast<T>(QuantizeOne(v.v[k], 1.0f / unit, unit, limit, &v.v[k]));
    }
    StoreTyped<N>(x, i, v);
    Store<T, N>(q, i, out);
  }
};

template <class T>
struct DequantizeOp {
  static constexpr int kLanes = 4;
  const uint8_t* q;
  float* x;
  float unit;

  bool aligned() const { return IsAligned<float, kLanes>(x) && IsAligned<T, kLanes>(q); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    Vector<float, N> v = LoadTyped<N>(x, i);
    const Vector<T, N> b = Load<T, N>(q, i);
    GW_UNROLL
    for (int k = 0; k < N; ++k) v.v[k] += static_cast<float>(b.v[k]) * unit;
    StoreTyped<N>(x, i, v);
  }
};

struct SplitBf16Op {
  static constexpr int kLanes = 4;
  float* x;
  uint8_t* out;

  bool aligned() const { return IsAligned<float, kLanes>(x) && IsAligned<uint16_t, kLanes>(out); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    Vector<float, N> v = LoadTyped<N>(x, i);
    Vector<uint16_t, N> b;
    GW_UNROLL
    for (int k = 0; k < N; ++k) b.v[k] = SplitBf16(v.v[k], &v.v[k]);
    StoreTyped<N>(x, i, v);
    Store<uint16_t, N>(out, i, b);
  }
};

struct AddBf16Op {
  static constexpr int kLanes = 4;
  const uint8_t* values;
  float* x;

  bool aligned() const { return IsAligned<float, kLanes>(x) && IsAligned<uint16_t, kLanes>(values); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    Vector<float, N> v = LoadTyped<N>(x, i);
    const Vector<uint16_t, N> b = Load<uint16_t, N>(values, i);
    GW_UNROLL
    for (int k = 0; k < N; ++k) v.v[k] += Bf16ToFloat(b.v[k]);
    StoreTyped<N>(x, i, v);
  }
};

// T: uint8_t, uint16_t, uint32_t. `sign`: 1 or 2^32 - 1.
template <class T>
struct AddCellsOp {
  static constexpr int kLanes = 16 / sizeof(T);
  uint8_t* acc;
  const uint8_t* cells;
  uint32_t sign;

  bool aligned() const { return IsAligned<T, kLanes>(acc) && IsAligned<T, kLanes>(cells); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    Vector<T, N> a = Load<T, N>(acc, i);
    const Vector<T, N> b = Load<T, N>(cells, i);
    GW_UNROLL
    for (int k = 0; k < N; ++k) a.v[k] = static_cast<T>(uint32_t{a.v[k]} + sign * uint32_t{b.v[k]});
    Store<T, N>(acc, i, a);
  }
};

}  // namespace gradwire::kernels::cuda

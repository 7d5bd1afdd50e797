// Optimizer steps and the preconditioner, element by element. Contracts: kernels/backend.h.
#pragma once

#include "kernels/cuda/bodies/block.cuh"
#include "kernels/cuda/device_values.h"
#include "kernels/math/fixed_point.h"
#include "kernels/math/optimizer.h"

namespace gradwire::kernels::cuda {

struct AddOp {
  static constexpr int kLanes = 4;
  float* x;
  const float* y;

  bool aligned() const { return IsAligned<float, kLanes>(x) && IsAligned<float, kLanes>(y); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    Vector<float, N> a = LoadTyped<N>(x, i);
    const Vector<float, N> b = LoadTyped<N>(y, i);
    GW_UNROLL
    for (int k = 0; k < N; ++k) a.v[k] += b.v[k];
    StoreTyped<N>(x, i, a);
  }
};

struct AddPreconditionedOp {
  static constexpr int kLanes = 4;
  float* x;
  const float* gradient;
  float* second_moment;
  PreconditionCoefficients c;

  bool aligned() const {
    return IsAligned<float, kLanes>(x) && IsAligned<float, kLanes>(gradient) && IsAligned<float, kLanes>(second_moment);
  }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    Vector<float, N> a = LoadTyped<N>(x, i);
    const Vector<float, N> g = LoadTyped<N>(gradient, i);
    Vector<float, N> v = LoadTyped<N>(second_moment, i);
    GW_UNROLL
    for (int k = 0; k < N; ++k) a.v[k] += Precondition(g.v[k], &v.v[k], c);
    StoreTyped<N>(x, i, a);
    StoreTyped<N>(second_moment, i, v);
  }
};

// x[i] = decay * x[i] + gradient[i], preconditioned where there is a second moment; nothing where *bad names an
// element.
struct TakeInOp {
  static constexpr int kLanes = 4;
  float* x;
  const float* gradient;
  float* second_moment;  // may be null
  float decay;
  PreconditionCoefficients c;
  const uint64_t* bad;  // may be null

  bool aligned() const {
    return IsAligned<float, kLanes>(x) && IsAligned<float, kLanes>(gradient) && IsAligned<float, kLanes>(second_moment);
  }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    if (bad != nullptr && *bad != ~uint64_t{0}) return;
    Vector<float, N> a = LoadTyped<N>(x, i);
    Vector<float, N> g = LoadTyped<N>(gradient, i);
    if (second_moment != nullptr) {
      Vector<float, N> v = LoadTyped<N>(second_moment, i);
      GW_UNROLL
      for (int k = 0; k < N; ++k) g.v[k] = Precondition(g.v[k], &v.v[k], c);
      StoreTyped<N>(second_moment, i, v);
    }
    GW_UNROLL
    for (int k = 0; k < N; ++k) a.v[k] = decay * a.v[k] + g.v[k];
    StoreTyped<N>(x, i, a);
  }
};

struct SgdOp {
  static constexpr int kLanes = 4;
  float* p;
  const float* g;
  SgdCoefficients c;

  bool aligned() const { return IsAligned<float, kLanes>(p) && IsAligned<float, kLanes>(g); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    Vector<float, N> a = LoadTyped<N>(p, i);
    const Vector<float, N> b = LoadTyped<N>(g, i);
    GW_UNROLL
    for (int k = 0; k < N; ++k) a.v[k] = SgdStep(a.v[k], b.v[k], c);
    StoreTyped<N>(p, i, a);
  }
};

struct SgdMomentumOp {
  static constexpr int kLanes = 4;
  float* p;
  const float* g;
  float* momentum;
  SgdCoefficients c;

  bool aligned() const {
    return IsAligned<float, kLanes>(p) && IsAligned<float, kLanes>(g) && IsAligned<float, kLanes>(momentum);
  }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    Vector<float, N> a = LoadTyped<N>(p, i);
    const Vector<float, N> b = LoadTyped<N>(g, i);
    Vector<float, N> m = LoadTyped<N>(momentum, i);
    GW_UNROLL
    for (int k = 0; k < N; ++k) a.v[k] = SgdMomentumStep(a.v[k], b.v[k], &m.v[k], c);
    StoreTyped<N>(p, i, a);
    StoreTyped<N>(momentum, i, m);
  }
};

struct AdamWOp {
  static constexpr int kLanes = 4;
  float* p;
  const float* g;
  float* m;
  float* v;
  AdamWCoefficients c;

  bool aligned() const {
    return IsAligned<float, kLanes>(p) && IsAligned<float, kLanes>(g) && IsAligned<float, kLanes>(m) &&
           IsAligned<float, kLanes>(v);
  }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    Vector<float, N> a = LoadTyped<N>(p, i);
    const Vector<float, N> b = LoadTyped<N>(g, i);
    Vector<float, N> first = LoadTyped<N>(m, i);
    Vector<float, N> second = LoadTyped<N>(v, i);
    GW_UNROLL
    for (int k = 0; k < N; ++k) a.v[k] = AdamWStep(a.v[k], b.v[k], &first.v[k], &second.v[k], c);
    StoreTyped<N>(p, i, a);
    StoreTyped<N>(m, i, first);
    StoreTyped<N>(v, i, second);
  }
};

struct PlainStepOp {
  static constexpr int kLanes = 4;
  float* p;
  const float* mean;
  float learning_rate;
  float weight_decay;

  bool aligned() const { return IsAligned<float, kLanes>(p) && IsAligned<float, kLanes>(mean); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    Vector<float, N> a = LoadTyped<N>(p, i);
    const Vector<float, N> b = LoadTyped<N>(mean, i);
    GW_UNROLL
    for (int k = 0; k < N; ++k) {
      a.v[k] = weight_decay == 0.0f ? PlainStep(a.v[k], b.v[k], learning_rate)
                                    : DecayedPlainStep(a.v[k], b.v[k], learning_rate, weight_decay);
    }
    StoreTyped<N>(p, i, a);
  }
};

// out[i] = mean of sums[i], an element at position i. `out` may be `sums`.
struct MeansOfIntegersOp {
  static constexpr int kLanes = 4;
  const int32_t* sums;
  RunScales scales;
  float* out;
  float count;

  bool aligned() const { return IsAligned<int32_t, kLanes>(sums) && IsAligned<float, kLanes>(out); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    const Vector<int32_t, N> sum = LoadTyped<N>(sums, i);
    Vector<float, N> mean;
    uint32_t run = RunOf(scales, i);
    GW_UNROLL
    for (int k = 0; k < N; ++k) {
      if (i + static_cast<uint64_t>(k) >= scales.begin[run + 1]) ++run;
      mean.v[k] = MeanOfInteger(sum.v[k], scales.unit[run], count);
    }
    StoreTyped<N>(out, i, mean);
  }
};

struct ScatterMeansOp {
  const uint32_t* positions;
  const int32_t* integers;
  RunScales scales;
  float* out;
  float count;

  GW_DEVICE void Run(uint64_t i) const {
    const uint32_t position = positions[i];
    out[position] = MeanOfInteger(integers[i], scales.unit[RunOf(scales, position)], count);
  }
};

// `p` and `learning_rates`: per run.
struct SparsePlainStepsOp {
  float* const* p;
  const uint32_t* positions;
  const int32_t* integers;
  RunScales scales;
  const float* learning_rates;
  float count;

  GW_DEVICE void Run(uint64_t i) const {
    const uint32_t position = positions[i];
    const uint32_t run = RunOf(scales, position);
    float& parameter = p[run][position - scales.begin[run]];
    parameter = PlainStep(parameter, MeanOfInteger(integers[i], scales.unit[run], count), learning_rates[run]);
  }
};

struct SparsePlainStepOp {
  float* p;
  const uint32_t* positions;
  const int32_t* integers;
  uint32_t first_position;
  float unit;
  float count;
  float learning_rate;

  GW_DEVICE void Run(uint64_t i) const {
    float& parameter = p[positions[i] - first_position];
    parameter = PlainStep(parameter, MeanOfInteger(integers[i], unit, count), learning_rate);
  }
};

}  // namespace gradwire::kernels::cuda

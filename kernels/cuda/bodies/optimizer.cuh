// Optimizer steps and the preconditioner, element by element. Contracts: kernels/backend.h.
#pragma once

#include "kernels/cuda/bodies/lanes.cuh"
#include "kernels/cuda/device_values.h"
#include "kernels/math/fixed_point.h"
#include "kernels/math/optimizer.h"

namespace gradwire::kernels::cuda {

struct AddOp {
  static constexpr int kLanes = 4;
  Typed<float> x;
  Typed<const float> y;

  bool aligned() const { return AllAligned<kLanes>(x, y); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    EachLane<N>(
        i, [&](int, float& a, float b) { a += b; }, x, y);
  }
};

struct AddPreconditionedOp {
  static constexpr int kLanes = 4;
  Typed<float> x;
  Typed<const float> gradient;
  Typed<float> second_moment;
  PreconditionCoefficients c;

  bool aligned() const { return AllAligned<kLanes>(x, gradient, second_moment); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    EachLane<N>(
        i, [&](int, float& a, float g, float& v) { a += Precondition(g, &v, c); }, x, gradient, second_moment);
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
  Typed<float> p;
  Typed<const float> g;
  SgdCoefficients c;

  bool aligned() const { return AllAligned<kLanes>(p, g); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    EachLane<N>(
        i, [&](int, float& a, float b) { a = SgdStep(a, b, c); }, p, g);
  }
};

struct SgdMomentumOp {
  static constexpr int kLanes = 4;
  Typed<float> p;
  Typed<const float> g;
  Typed<float> momentum;
  SgdCoefficients c;

  bool aligned() const { return AllAligned<kLanes>(p, g, momentum); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    EachLane<N>(
        i, [&](int, float& a, float b, float& m) { a = SgdMomentumStep(a, b, &m, c); }, p, g, momentum);
  }
};

struct AdamWOp {
  static constexpr int kLanes = 4;
  Typed<float> p;
  Typed<const float> g;
  Typed<float> m;
  Typed<float> v;
  AdamWCoefficients c;

  bool aligned() const { return AllAligned<kLanes>(p, g, m, v); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    EachLane<N>(
        i, [&](int, float& a, float b, float& first, float& second) { a = AdamWStep(a, b, &first, &second, c); }, p, g,
        m, v);
  }
};

struct PlainStepOp {
  static constexpr int kLanes = 4;
  Typed<float> p;
  Typed<const float> mean;
  float learning_rate;
  float weight_decay;

  bool aligned() const { return AllAligned<kLanes>(p, mean); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    EachLane<N>(
        i,
        [&](int, float& a, float b) {
          a = weight_decay == 0.0f ? PlainStep(a, b, learning_rate)
                                   : DecayedPlainStep(a, b, learning_rate, weight_decay);
        },
        p, mean);
  }
};

// out[i] = mean of sums[i], an element at position i. `out` may be `sums`.
struct MeansOfIntegersOp {
  static constexpr int kLanes = 4;
  Typed<const int32_t> sums;
  RunScales scales;
  Out<Typed<float>> out;
  float count;

  bool aligned() const { return AllAligned<kLanes>(sums, out); }
  template <int N>
  GW_DEVICE void Run(uint64_t i) const {
    uint32_t run = RunOf(scales, i);
    EachLane<N>(
        i,
        [&](int k, int32_t sum, float& mean) {
          if (i + static_cast<uint64_t>(k) >= scales.begin[run + 1]) ++run;
          mean = MeanOfInteger(sum, scales.unit[run], count);
        },
        sums, out);
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

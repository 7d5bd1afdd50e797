// Reference backend: optimizer steps. Element-wise, so they vectorise; AdamW is bound by memory from AVX2 on.
#include "kernels/cpu/reference/clones.h"
#include "kernels/cpu/reference/loops.h"
#include "kernels/math/fixed_point.h"

namespace gradwire::kernels::reference {

GW_CLONES void Sgd(float* __restrict p, const float* __restrict g, float* __restrict momentum, size_t n,
                   const SgdCoefficients& coefficients) {
  const SgdCoefficients c = coefficients;
  if (c.momentum == 0.0f) {
    for (size_t i = 0; i < n; ++i) p[i] = SgdStep(p[i], g[i], c);
  } else {
    for (size_t i = 0; i < n; ++i) p[i] = SgdMomentumStep(p[i], g[i], &momentum[i], c);
  }
}

GW_CLONES void AdamW(float* __restrict p, const float* __restrict g, float* __restrict m, float* __restrict v, size_t n,
                     const AdamWCoefficients& coefficients) {
  const AdamWCoefficients c = coefficients;
  for (size_t i = 0; i < n; ++i) p[i] = AdamWStep(p[i], g[i], &m[i], &v[i], c);
}

GW_CLONES void PlainStep(float* __restrict p, const float* __restrict mean, size_t n, float learning_rate,
                         float weight_decay) {
  if (weight_decay == 0.0f) {
    for (size_t i = 0; i < n; ++i) p[i] = kernels::PlainStep(p[i], mean[i], learning_rate);
  } else {
    for (size_t i = 0; i < n; ++i) p[i] = DecayedPlainStep(p[i], mean[i], learning_rate, weight_decay);
  }
}

void SparsePlainStep(float* p, const uint32_t* positions, const int32_t* integers, size_t n, uint32_t first_position,
                     int exponent, uint32_t contributors, float learning_rate) {
  const float unit = PowerOfTwo(exponent);
  const float count = static_cast<float>(contributors);
  constexpr size_t kAhead = 32;  // positions lie too far apart for the hardware to foresee them
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(&p[positions[i + kAhead] - first_position], 1);
    float& parameter = p[positions[i] - first_position];
    parameter = kernels::PlainStep(parameter, MeanOfInteger(integers[i], unit, count), learning_rate);
  }
}

}  // namespace gradwire::kernels::reference

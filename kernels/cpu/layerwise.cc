// See layerwise.h. Loops that the compiler vectorises; the sums are written as vectors of eight.
#include "kernels/cpu/layerwise.h"

#include "kernels/cpu/reference/clones.h"

namespace gradwire::kernels {
namespace {

constexpr size_t kSums = 8;

double Folded(const double* s) { return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7])); }

}  // namespace

GW_CLONES double SumOfSquares(const float* x, size_t n) {
  double sums[kSums] = {};
  size_t i = 0;
  for (; i + kSums <= n; i += kSums) {
    for (size_t j = 0; j < kSums; ++j) {
      const double value = x[i + j];
      sums[j] += value * value;
    }
  }
  for (size_t j = 0; i + j < n; ++j) {
    const double value = x[i + j];
    sums[j] += value * value;
  }
  return Folded(sums);
}

GW_CLONES void Scale(float* x, size_t n, float factor) {
  for (size_t i = 0; i < n; ++i) x[i] *= factor;
}

GW_CLONES DirectionSums SumsOfDirections(const float* __restrict p, const float* __restrict g,
                                         const float* __restrict m, const float* __restrict v, size_t n,
                                         const LayerCoefficients& coefficients) {
  const LayerCoefficients c = coefficients;
  double of_moment[kSums] = {};
  double of_gradient[kSums] = {};
  const auto add = [&](size_t i, size_t j) {
    const LayerDirections d = DirectionsOf(p[i], g[i] * c.gradient_scale, m[i], v[i], c);
    of_moment[j] += static_cast<double>(d.of_moment) * static_cast<double>(d.of_moment);
    of_gradient[j] += static_cast<double>(d.of_gradient) * static_cast<double>(d.of_gradient);
  };
  size_t i = 0;
  for (; i + kSums <= n; i += kSums) {
    for (size_t j = 0; j < kSums; ++j) add(i + j, j);
  }
  for (size_t j = 0; i + j < n; ++j) add(i + j, j);
  return {Folded(of_moment), Folded(of_gradient)};
}

GW_CLONES void Lamb(float* __restrict p, const float* __restrict g, float* __restrict m, float* __restrict v, size_t n,
                    const LayerCoefficients& coefficients) {
  const LayerCoefficients c = coefficients;
  for (size_t i = 0; i < n; ++i) p[i] = LambStep(p[i], g[i], &m[i], &v[i], c);
}

GW_CLONES void Lans(float* __restrict p, const float* __restrict g, float* __restrict m, float* __restrict v, size_t n,
                    const LayerCoefficients& coefficients) {
  const LayerCoefficients c = coefficients;
  for (size_t i = 0; i < n; ++i) p[i] = LansStep(p[i], g[i], &m[i], &v[i], c);
}

GW_CLONES void Lion(float* __restrict p, const float* __restrict g, float* __restrict m, size_t n,
                    const LionCoefficients& coefficients) {
  const LionCoefficients c = coefficients;
  for (size_t i = 0; i < n; ++i) p[i] = LionStep(p[i], g[i], &m[i], c);
}

}  // namespace gradwire::kernels

// See arithmetic.h.
#include "common/codec/powersgd/arithmetic.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/codec/bits/draw.h"
#include "kernels/cpu/reference/clones.h"

namespace gradwire::powersgd {
namespace {

constexpr size_t kLanes = 16;
constexpr double kDependent =
    1e-6;  // of a column's norm: what rounding to float32 leaves of one that depends on others

double SumOfProducts(const double* a, const double* b, size_t n) {
  double sum = 0;
  for (size_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace

GW_CLONES float Dot(const float* a, const float* b, size_t n) {
  float lanes[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
  }
  for (size_t lane = 0; i < n; ++i, ++lane) lanes[lane] += a[i] * b[i];
  for (size_t half = kLanes / 2; half > 0; half /= 2) {
    for (size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

GW_CLONES void AddScaled(const float* x, float scale, size_t n, float* out) {
  for (size_t i = 0; i < n; ++i) out[i] += scale * x[i];
}

GW_CLONES void Combine(const float* scales, uint32_t rank, const float* columns, size_t stride, size_t n, float* out) {
  for (size_t i = 0; i < n; ++i) out[i] = scales[0] * columns[i];
  for (uint32_t k = 1; k < rank; ++k) {
    const float* const column = columns + k * stride;
    for (size_t i = 0; i < n; ++i) out[i] += scales[k] * column[i];
  }
}

void NormalizeColumns(float* columns, size_t n, uint32_t rank, uint64_t salt) {
  for (uint32_t k = 0; k < rank; ++k) {
    float* const column = columns + k * n;
    if (std::all_of(column, column + n, [](float x) { return x == 0; })) {
      for (size_t i = 0; i < n; ++i) column[i] = UnitDraw(salt, k * n + i) - 0.5f;
    }
    double square = 0;
    for (size_t i = 0; i < n; ++i) square += static_cast<double>(column[i]) * static_cast<double>(column[i]);
    const double norm = std::sqrt(square);
    for (size_t i = 0; norm != 0 && i < n; ++i) column[i] = static_cast<float>(static_cast<double>(column[i]) / norm);
  }
}

void Orthonormalize(float* columns, size_t n, uint32_t rank) {
  std::vector<double> done(n * rank);
  for (uint32_t k = 0; k < rank; ++k) {
    double* const column = done.data() + k * n;
    for (size_t i = 0; i < n; ++i) column[i] = static_cast<double>(columns[k * n + i]);
    const double before = std::sqrt(SumOfProducts(column, column, n));
    for (int pass = 0; pass < 2; ++pass) {
      for (uint32_t other = 0; other < k; ++other) {
        const double* const axis = done.data() + other * n;
        const double along = SumOfProducts(column, axis, n);
        for (size_t i = 0; i < n; ++i) column[i] -= along * axis[i];
      }
    }
    const double norm = std::sqrt(SumOfProducts(column, column, n));
    const double scale = norm > kDependent * before ? 1 / norm : 0;
    for (size_t i = 0; i < n; ++i) column[i] *= scale;
    for (size_t i = 0; i < n; ++i) columns[k * n + i] = static_cast<float>(column[i]);
  }
}

}  // namespace gradwire::powersgd

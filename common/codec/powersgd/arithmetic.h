// The arithmetic of PowerSGD on columns of float32. Every operation is done in a fixed order and rounded by itself: the
// same bits on every machine.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire::powersgd {

// The sum of a[i] * b[i], in 16 sums of every sixteenth product.
float Dot(const float* a, const float* b, size_t n);

// out[i] += scale * x[i].
void AddScaled(const float* x, float scale, size_t n, float* out);

// out[i] = the sum of scales[k] * columns[k * stride + i] over k = 0 .. rank - 1, in this order. rank: at least 1.
void Combine(const float* scales, uint32_t rank, const float* columns, size_t stride, size_t n, float* out);

// Scales each of `rank` columns of length n to norm 1. One that is 0 is drawn from `salt` first.
void NormalizeColumns(float* columns, size_t n, uint32_t rank, uint64_t salt);

// Gram-Schmidt in float64, column by column, twice each: columns of norm 1, orthogonal to each other. One that depends
// on those before it, but for rounding, becomes 0.
void Orthonormalize(float* columns, size_t n, uint32_t rank);

}  // namespace gradwire::powersgd

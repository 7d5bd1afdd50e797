// Steps and sums of squares of the optimizers that need the norms of whole tensors, and Lion's step: over arrays in
// host memory. No backend of a device has them; every host gives the same bits.
//
// A sum of squares is one of eight sums in float64, of the elements whose index is 0, 1, ... 7 modulo 8, in order,
// which are added as ((s0+s4)+(s2+s6))+((s1+s5)+(s3+s7)).
#pragma once

#include <cstddef>

#include "kernels/math/layerwise.h"

namespace gradwire::kernels {

double SumOfSquares(const float* x, size_t n);
// x[i] *= factor.
void Scale(float* x, size_t n, float factor);

struct DirectionSums {
  double of_moment = 0;    // LAMB: |u|^2. LANS: |R|^2
  double of_gradient = 0;  // LANS: |Q|^2
};
// What the step would go along; changes nothing. LAMB's `c` has a gradient_scale of 1.
DirectionSums SumsOfDirections(const float* p, const float* g, const float* m, const float* v, size_t n,
                               const LayerCoefficients& c);

// One step of n elements of one tensor; arrays do not overlap.
void Lamb(float* p, const float* g, float* m, float* v, size_t n, const LayerCoefficients& c);
void Lans(float* p, const float* g, float* m, float* v, size_t n, const LayerCoefficients& c);
void Lion(float* p, const float* g, float* m, size_t n, const LionCoefficients& c);

}  // namespace gradwire::kernels

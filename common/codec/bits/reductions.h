// Sums and maxima over float32, vectorised by the compiler; the same bits with any instructions. Sums are taken in
// eight partial sums, in float64.
#pragma once

#include <cstddef>

namespace gradwire {

float LargestMagnitude(const float* x, size_t n);
double Sum(const float* x, size_t n);
double SumOfMagnitudes(const float* x, size_t n);
double SumOfSquares(const float* x, size_t n);

// Sums of the values that are not negative, and of the others, and how many the first are.
struct SignedSums {
  double positive = 0;
  double negative = 0;
  size_t positives = 0;
};
SignedSums SumsBySign(const float* x, size_t n);

}  // namespace gradwire

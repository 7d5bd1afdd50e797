// See hadamard.h. Bits of the index are taken from the topmost to the lowest: two at a time, in loops that the compiler
// vectorises; the lowest three in vectors of four, which every machine has.
#include "common/codec/homomorphic/hadamard.h"

#include <cstring>

#include "kernels/cpu/reference/clones.h"

namespace gradwire::homomorphic {
namespace {

constexpr size_t kLastThree = 8;  // numbers that the last three stages are about
typedef float Four __attribute__((vector_size(4 * sizeof(float))));

// Numbers `half` apart.
inline __attribute__((always_inline)) void Stage(float* x, size_t d, size_t half) {
  for (size_t block = 0; block < d; block += 2 * half) {
    float* const __restrict a = x + block;
    float* const __restrict b = a + half;
    for (size_t i = 0; i < half; ++i) {
      const float p = a[i], q = b[i];
      a[i] = p + q;
      b[i] = p - q;
    }
  }
}

// Numbers 2 * quarter apart, then those a quarter apart.
inline __attribute__((always_inline)) void TwoStages(float* x, size_t d, size_t quarter) {
  for (size_t block = 0; block < d; block += 4 * quarter) {
    float* const __restrict a = x + block;
    float* const __restrict b = a + quarter;
    float* const __restrict c = b + quarter;
    float* const __restrict e = c + quarter;
    for (size_t i = 0; i < quarter; ++i) {
      const float p = a[i] + c[i], q = b[i] + e[i], r = a[i] - c[i], s = b[i] - e[i];
      a[i] = p + q;
      b[i] = p - q;
      c[i] = r + s;
      e[i] = r - s;
    }
  }
}

inline __attribute__((always_inline)) Four LastTwoStages(Four v) {
  constexpr Four kTwos = {1, 1, -1, -1};
  constexpr Four kOnes = {1, -1, 1, -1};
  v = __builtin_shufflevector(v, v, 2, 3, 0, 1) + v * kTwos;
  return __builtin_shufflevector(v, v, 1, 0, 3, 2) + v * kOnes;
}

inline __attribute__((always_inline)) void LastThreeStages(float* x, size_t d) {
  for (size_t i = 0; i < d; i += kLastThree) {
    Four a, b;
    std::memcpy(&a, x + i, sizeof(a));
    std::memcpy(&b, x + i + 4, sizeof(b));
    const Four sum = LastTwoStages(a + b), difference = LastTwoStages(a - b);
    std::memcpy(x + i, &sum, sizeof(sum));
    std::memcpy(x + i + 4, &difference, sizeof(difference));
  }
}

}  // namespace

GW_CLONES void Hadamard(float* x, size_t d) {
  size_t half = d / 2;
  for (; half >= 2 * kLastThree; half /= 4) TwoStages(x, d, half / 2);
  if (half == kLastThree) {
    Stage(x, d, half);
    half /= 2;
  }
  if (d >= kLastThree) return LastThreeStages(x, d);
  for (; half > 0; half /= 2) Stage(x, d, half);
}

}  // namespace gradwire::homomorphic

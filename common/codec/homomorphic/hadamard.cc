// See hadamard.h. Bits of the index are taken from the topmost to the lowest. Two at a time, as long as vectors lie
// whole on either side; the lowest three within vectors of eight.
#include "common/codec/homomorphic/hadamard.h"

#include <cstring>

#include "kernels/cpu/reference/clones.h"

namespace gradwire::homomorphic {
namespace {

constexpr size_t kLanes = 8;
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));

// Numbers `half` apart.
inline __attribute__((always_inline)) void Stage(float* x, size_t d, size_t half) {
  for (size_t block = 0; block < d; block += 2 * half) {
    float* const a = x + block;
    float* const b = a + half;
    for (size_t i = 0; i < half; ++i) {
      const float p = a[i], q = b[i];
      a[i] = p + q;
      b[i] = p - q;
    }
  }
}

// Numbers 2 * quarter apart, then those a quarter apart. `quarter`: a multiple of kLanes.
inline __attribute__((always_inline)) void TwoStages(float* x, size_t d, size_t quarter) {
  for (size_t block = 0; block < d; block += 4 * quarter) {
    float* const a = x + block;
    for (size_t i = 0; i < quarter; i += kLanes) {
      Lanes v[4];
      for (size_t k = 0; k < 4; ++k) std::memcpy(&v[k], a + k * quarter + i, sizeof(Lanes));
      const Lanes p = v[0] + v[2], q = v[1] + v[3], r = v[0] - v[2], s = v[1] - v[3];
      v[0] = p + q;
      v[1] = p - q;
      v[2] = r + s;
      v[3] = r - s;
      for (size_t k = 0; k < 4; ++k) std::memcpy(a + k * quarter + i, &v[k], sizeof(Lanes));
    }
  }
}

inline __attribute__((always_inline)) void LastThreeStages(float* x, size_t d) {
  constexpr Lanes kFours = {1, 1, 1, 1, -1, -1, -1, -1};
  constexpr Lanes kTwos = {1, 1, -1, -1, 1, 1, -1, -1};
  constexpr Lanes kOnes = {1, -1, 1, -1, 1, -1, 1, -1};
  for (size_t i = 0; i < d; i += kLanes) {
    Lanes v;
    std::memcpy(&v, x + i, sizeof(v));
    v = __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3) + v * kFours;
    v = __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5) + v * kTwos;
    v = __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6) + v * kOnes;
    std::memcpy(x + i, &v, sizeof(v));
  }
}

}  // namespace

GW_CLONES void Hadamard(float* x, size_t d) {
  size_t half = d / 2;
  for (; half >= 2 * kLanes; half /= 4) TwoStages(x, d, half / 2);
  if (half == kLanes) {
    Stage(x, d, half);
    half /= 2;
  }
  if (d >= kLanes) return LastThreeStages(x, d);
  for (; half > 0; half /= 2) Stage(x, d, half);
}

}  // namespace gradwire::homomorphic

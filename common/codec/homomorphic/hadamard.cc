// See hadamard.h. Each stage takes the topmost bit of the index, transforms along it, and puts it lowest: so all stages
// read and write alike, in vectors, and after as many stages as there are bits the order is what it was.
#include "common/codec/homomorphic/hadamard.h"

#include <cstring>
#include <utility>

#include "kernels/cpu/reference/clones.h"

namespace gradwire::homomorphic {
namespace {

inline __attribute__((always_inline)) void Stage(const float* __restrict in, float* __restrict out, size_t half) {
  for (size_t i = 0; i < half; ++i) {
    const float a = in[i];
    const float b = in[half + i];
    out[2 * i] = a + b;
    out[2 * i + 1] = a - b;
  }
}

}  // namespace

GW_CLONES void Hadamard(float* x, float* scratch, size_t d) {
  float* from = x;
  float* to = scratch;
  for (size_t done = 1; done < d; done *= 2) {
    Stage(from, to, d / 2);
    std::swap(from, to);
  }
  if (from != x) std::memcpy(x, from, d * sizeof(float));
}

}  // namespace gradwire::homomorphic

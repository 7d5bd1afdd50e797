// Compiles kernels/math for the device: every function of it is called from a kernel here, so that a change which only
// the host compiler accepts fails the build wherever there is a CUDA compiler. Not linked into anything.
#include "kernels/math/fixed_point.h"
#include "kernels/math/math.h"
#include "kernels/math/optimizer.h"
#include "kernels/math/select.h"
#include "kernels/math/sketch.h"

namespace gradwire::kernels {

__global__ void DeviceFixedPoint(float* x, int32_t* q, uint16_t* b, size_t n, int exponent, int32_t limit) {
  const size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x;
  if (i >= n) return;
  q[i] = QuantizeOne(x[i], PowerOfTwo(-exponent), PowerOfTwo(exponent), LargestFloatWithin(limit), &x[i]);
  b[i] = FloatToBf16(MeanOfInteger(q[i], PowerOfTwo(exponent), 2.0f) + Bf16ToFloat(b[i]));
  q[i] += RangeOfBits(FloatBits(x[i]) & 0x7FFFFFFFu);
}

__global__ void DeviceSketch(const float* x, uint32_t* cells, size_t n, uint64_t seed, uint32_t key, uint32_t groups,
                             uint32_t third) {
  const size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x;
  if (i >= n || !IsSelected(x[i], key, uint64_t{1} << 31, i, TiePhase(seed, 0, 1))) return;
  const SketchCells at = CellsOf(static_cast<uint32_t>(i), SketchSalt(seed, 1, 0, 0), groups, third);
  for (uint32_t cell : at.cell) atomicAdd(&cells[cell], 1u);
}

__global__ void DeviceOptimizer(float* p, const float* g, float* m, float* v, size_t n, float lr, uint64_t t) {
  const size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x;
  if (i >= n) return;
  p[i] = AdamWStep(p[i], g[i], &m[i], &v[i], MakeAdamW(lr, 0.1f, 0.9f, 0.95f, 1e-8f, t));
  p[i] = SgdMomentumStep(p[i], g[i], &m[i], SgdCoefficients{lr, 0.1f, 0.9f, true});
  p[i] = SgdStep(p[i], g[i], SgdCoefficients{lr, 0.1f, 0.0f, false});
  p[i] = PlainStep(DecayedPlainStep(p[i], g[i], lr, 0.1f), g[i], lr);
  p[i] += Precondition(g[i], &v[i], MakePrecondition(0.95f, 1e-8f, t));
}

}  // namespace gradwire::kernels

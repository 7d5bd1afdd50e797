// Optimizer steps that divide and take roots. Re-included once per target.
#if defined(GRADWIRE_KERNELS_CPU_SIMD_OPTIMIZER_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_KERNELS_CPU_SIMD_OPTIMIZER_INL_H_
#undef GRADWIRE_KERNELS_CPU_SIMD_OPTIMIZER_INL_H_
#else
#define GRADWIRE_KERNELS_CPU_SIMD_OPTIMIZER_INL_H_
#endif

#include "kernels/cpu/reference/loops.h"
#include "kernels/cpu/simd/common-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::kernels {
namespace HWY_NAMESPACE {

// optimizer.h's AdamWStep.
void AdamW(float* p, const float* g, float* m, float* v, size_t n, const AdamWCoefficients& c) {
  const F32 d;
  const size_t lanes = hn::Lanes(d);
  const VecF32 beta1 = hn::Set(d, c.beta1), one_minus_beta1 = hn::Set(d, c.one_minus_beta1);
  const VecF32 beta2 = hn::Set(d, c.beta2), one_minus_beta2 = hn::Set(d, c.one_minus_beta2);
  const VecF32 inverse_root = hn::Set(d, c.inverse_root), epsilon = hn::Set(d, c.epsilon);
  const VecF32 decay = hn::Set(d, c.decay), step = hn::Set(d, c.step);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const VecF32 gradient = hn::LoadU(d, g + i);
    const VecF32 first = hn::Add(hn::Mul(beta1, hn::LoadU(d, m + i)), hn::Mul(one_minus_beta1, gradient));
    const VecF32 second =
        hn::Add(hn::Mul(beta2, hn::LoadU(d, v + i)), hn::Mul(one_minus_beta2, hn::Mul(gradient, gradient)));
    hn::StoreU(first, d, m + i);
    hn::StoreU(second, d, v + i);
    const VecF32 denominator = hn::Add(hn::Mul(hn::Sqrt(second), inverse_root), epsilon);
    const VecF32 moved = hn::Mul(step, hn::Div(first, denominator));
    hn::StoreU(hn::Sub(hn::Mul(hn::LoadU(d, p + i), decay), moved), d, p + i);
  }
  reference::AdamW(p + i, g + i, m + i, v + i, n - i, c);
}

// optimizer.h's Precondition.
void AddPreconditioned(float* x, const float* gradient, float* second_moment, size_t n,
                       const PreconditionCoefficients& c) {
  const F32 d;
  const size_t lanes = hn::Lanes(d);
  const VecF32 beta2 = hn::Set(d, c.beta2), one_minus_beta2 = hn::Set(d, c.one_minus_beta2);
  const VecF32 inverse_root = hn::Set(d, c.inverse_root), epsilon = hn::Set(d, c.epsilon);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const VecF32 g = hn::LoadU(d, gradient + i);
    const VecF32 second =
        hn::Add(hn::Mul(beta2, hn::LoadU(d, second_moment + i)), hn::Mul(one_minus_beta2, hn::Mul(g, g)));
    hn::StoreU(second, d, second_moment + i);
    const VecF32 denominator = hn::Add(hn::Mul(hn::Sqrt(second), inverse_root), epsilon);
    hn::StoreU(hn::Add(hn::LoadU(d, x + i), hn::Div(g, denominator)), d, x + i);
  }
  reference::AddPreconditioned(x + i, gradient + i, second_moment + i, n - i, c);
}

}  // namespace HWY_NAMESPACE
}  // namespace gradwire::kernels
HWY_AFTER_NAMESPACE();

#endif  // include guard

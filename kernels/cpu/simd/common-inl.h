// Vector helpers that the kernels share. Re-included once per target.
#if defined(GRADWIRE_KERNELS_CPU_SIMD_COMMON_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_KERNELS_CPU_SIMD_COMMON_INL_H_
#undef GRADWIRE_KERNELS_CPU_SIMD_COMMON_INL_H_
#else
#define GRADWIRE_KERNELS_CPU_SIMD_COMMON_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/backend.h"
#include "kernels/cpu/simd/compress_table.h"
#include "kernels/math/fixed_point.h"
#include "kernels/math/grid.h"
#include "kernels/math/math.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::kernels {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;
using U64 = hn::ScalableTag<uint64_t>;
using VecF32 = hn::Vec<F32>;
using VecI32 = hn::Vec<I32>;
using VecU32 = hn::Vec<U32>;
using VecU64 = hn::Vec<U64>;

// One core reads memory half as fast again when it follows eight places at once, four cache lines at a time: each place
// has its own prefetch stream. The places must be 64 KiB apart or more.
inline constexpr size_t kStreams = 8;
inline constexpr size_t kVisit = 64;  // elements

HWY_INLINE VecU32 MagnitudeBits(VecU32 bits) { return hn::And(bits, hn::Set(U32(), 0x7FFFFFFFu)); }
HWY_INLINE VecU32 LoadMagnitudes(const float* x) { return MagnitudeBits(hn::BitCast(U32(), hn::LoadU(F32(), x))); }

// Bit i: lane i of a mask of at most 64 lanes.
template <class D>
HWY_INLINE uint64_t BitsOf(D d, hn::Mask<D> mask) {
#if HWY_TARGET == HWY_AVX3
  (void)d;
  return static_cast<uint64_t>(mask.raw);  // StoreMaskBits takes several times as long
#else
  uint64_t bits = 0;
  hn::StoreMaskBits(d, mask, reinterpret_cast<uint8_t*>(&bits));
  return bits;
#endif
}

// The lanes of a mask, moved to the front. Highway's own AVX2 version copies its table to the stack in every call.
template <class D>
HWY_INLINE hn::Vec<D> CompressLanes(D d, hn::Vec<D> v, hn::Mask<D> mask) {
#if HWY_TARGET == HWY_AVX2
  const U32 du;
  alignas(32) static constexpr uint32_t kShifts[8] = {0, 4, 8, 12, 16, 20, 24, 28};
  const VecU32 packed = hn::Set(du, kCompressTable.lanes[BitsOf(d, mask)]);
  const __m256i index = _mm256_srlv_epi32(packed.raw, hn::Load(du, kShifts).raw);
  return hn::BitCast(d, VecU32{_mm256_permutevar8x32_epi32(hn::BitCast(du, v).raw, index)});
#else
  return hn::Compress(v, mask);
#endif
}

// The low 64 bits of each product.
HWY_INLINE VecU64 MultiplyLow(VecU64 a, uint64_t b) {
#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
  return a * hn::Set(U64(), b);
#elif HWY_TARGET == HWY_SCALAR
  return hn::Set(U64(), hn::GetLane(a) * b);
#else
  const hn::Repartition<uint32_t, U64> d32;
  const auto low = hn::BitCast(d32, hn::Set(U64(), b & 0xFFFFFFFFu));
  const auto high = hn::BitCast(d32, hn::Set(U64(), b >> 32));
  const auto a_low = hn::BitCast(d32, a);
  const auto a_high = hn::BitCast(d32, hn::ShiftRight<32>(a));
  const VecU64 cross = hn::Add(hn::MulEven(a_low, high), hn::MulEven(a_high, low));
  return hn::Add(hn::MulEven(a_low, low), hn::ShiftLeft<32>(cross));
#endif
}

// The product of 32-bit numbers in 64-bit lanes.
HWY_INLINE VecU64 MultiplyNarrow(VecU64 a, VecU64 b) {
#if HWY_TARGET == HWY_SCALAR
  return hn::Set(U64(), hn::GetLane(a) * hn::GetLane(b));
#else
  const hn::Repartition<uint32_t, U64> d32;
  return hn::MulEven(hn::BitCast(d32, a), hn::BitCast(d32, b));
#endif
}

// math.h's Mix.
HWY_INLINE VecU64 MixLanes(VecU64 x) {
  x = hn::Add(x, hn::Set(U64(), 0x9E3779B97F4A7C15ull));
  x = MultiplyLow(hn::Xor(x, hn::ShiftRight<30>(x)), 0xBF58476D1CE4E5B9ull);
  x = MultiplyLow(hn::Xor(x, hn::ShiftRight<27>(x)), 0x94D049BB133111EBull);
  return hn::Xor(x, hn::ShiftRight<31>(x));
}

// fixed_point.h's QuantizeOne.
struct Quantizer {
  Quantizer(int exponent, int32_t limit)
      : inverse(PowerOfTwo(-exponent)), unit(PowerOfTwo(exponent)), bound(LargestFloatWithin(limit)) {}

  HWY_INLINE VecI32 operator()(VecF32 x, VecF32* rest) const {
    const F32 d;
    const VecF32 limit = hn::Set(d, bound);
    VecF32 scaled = hn::Mul(x, hn::Set(d, inverse));
    scaled = hn::IfThenElse(hn::Gt(scaled, limit), limit, scaled);
    scaled = hn::IfThenElse(hn::Lt(scaled, hn::Neg(limit)), hn::Neg(limit), scaled);
    const VecF32 rounded = hn::Round(scaled);
    const VecF32 sent = hn::Mul(rounded, hn::Set(d, unit));
    const VecF32 difference = hn::Sub(x, sent);
    const VecF32 error = hn::Sub(hn::Neg(sent), hn::Sub(difference, x));
    const auto exact = hn::Eq(error, hn::Zero(d));
    *rest = hn::IfThenElse(exact, difference, x);
    return hn::IfThenElseZero(hn::RebindMask(I32(), exact), hn::ConvertTo(I32(), rounded));
  }

  float inverse, unit, bound;
};

#if HWY_TARGET != HWY_SCALAR && HWY_HAVE_FLOAT64
using F64 = hn::ScalableTag<double>;
using I64 = hn::RebindToSigned<F64>;
using VecI64 = hn::Vec<I64>;

// Lanes(F64()) values of `width` bytes, at any address, as float32: themselves (4) or bfloat16 (2).
template <int width>
HWY_INLINE hn::Vec<hn::Rebind<float, F64>> LoadFloats(const uint8_t* values) {
  const hn::Rebind<float, F64> d;
  if constexpr (width == 4) {
    const hn::Repartition<uint8_t, decltype(d)> bytes;
    return hn::BitCast(d, hn::LoadU(bytes, values));
  } else {
    const hn::Rebind<uint32_t, F64> d32;
    const hn::Rebind<uint16_t, F64> d16;
    const hn::Repartition<uint8_t, decltype(d16)> bytes;
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::BitCast(d16, hn::LoadU(bytes, values)))));
  }
}

// grid.h's ToGrid, lane by lane; see there why the additions round as they do.
struct GridConverter {
  HWY_INLINE GridConverter()
      : scale(hn::Set(F64(), kGridScale)), high_magic(hn::Set(F64(), kGridHigh)), low_magic(hn::Set(F64(), kGridLow)) {}

  HWY_INLINE VecI64 operator()(hn::Vec<hn::Rebind<float, F64>> x) const {
    const auto scaled = hn::Mul(hn::PromoteTo(F64(), x), scale);
    const auto high = hn::Add(scaled, high_magic);
    const auto low = hn::Add(hn::Sub(scaled, hn::Sub(high, high_magic)), low_magic);
    const auto upper = hn::Sub(hn::BitCast(I64(), high), hn::BitCast(I64(), high_magic));
    const auto lower = hn::Sub(hn::BitCast(I64(), low), hn::BitCast(I64(), low_magic));
    return hn::Add(hn::ShiftLeft<kGridHighBits>(upper), lower);
  }

  hn::Vec<F64> scale;
  hn::Vec<F64> high_magic;
  hn::Vec<F64> low_magic;
};
#endif

}  // namespace HWY_NAMESPACE
}  // namespace gradwire::kernels
HWY_AFTER_NAMESPACE();

#endif  // include guard

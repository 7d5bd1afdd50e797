// Conversions and searches of dense arrays. Re-included once per target.
#if defined(GRADWIRE_KERNELS_CPU_SIMD_DENSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_KERNELS_CPU_SIMD_DENSE_INL_H_
#undef GRADWIRE_KERNELS_CPU_SIMD_DENSE_INL_H_
#else
#define GRADWIRE_KERNELS_CPU_SIMD_DENSE_INL_H_
#endif

#include <algorithm>

#include "kernels/cpu/reference/loops.h"
#include "kernels/cpu/simd/common-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::kernels {
namespace HWY_NAMESPACE {

// The bits of the largest magnitude.
HWY_INLINE uint32_t LargestMagnitude(const float* x, size_t n) {
  const U32 d;
  const size_t lanes = hn::Lanes(d);
  const size_t part = n / kStreams / kVisit * kVisit;
  VecU32 largest = hn::Zero(d);
  for (size_t i = 0; i < part; i += kVisit) {
    for (size_t s = 0; s < kStreams; ++s) {
      const float* const at = x + s * part + i;
      for (size_t j = 0; j < kVisit; j += 2 * lanes) {
        largest = hn::Max(largest, hn::Max(LoadMagnitudes(at + j), LoadMagnitudes(at + j + lanes)));
      }
    }
  }
  uint32_t result = hn::GetLane(hn::MaxOfLanes(d, largest));
  for (size_t i = part * kStreams; i < n; ++i) result = std::max(result, FloatBits(x[i]) & 0x7FFFFFFFu);
  return result;
}

int RangeOf(const float* x, size_t n) {
  const uint32_t largest = LargestMagnitude(x, n);
  return largest == 0 ? kMinRange : std::clamp(RangeOfBits(largest), kMinRange, kMaxRange);
}

int64_t FindMagnitude(const uint8_t* values, int width, size_t n, uint32_t limit_bits) {
  if (width != 4 || reinterpret_cast<uintptr_t>(values) % alignof(float) != 0) {
    return reference::FindMagnitude(values, width, n, limit_bits);
  }
  if (LargestMagnitude(reinterpret_cast<const float*>(values), n) < limit_bits) return -1;
  return reference::FindMagnitude(values, width, n, limit_bits);
}

template <typename T>
HWY_INLINE void QuantizeAs(float* x, size_t n, const Quantizer& quantize, uint8_t* q) {
  const hn::Rebind<T, F32> narrow;
  for (size_t i = 0; i < n; i += hn::Lanes(F32())) {
    VecF32 rest;
    const VecI32 integers = quantize(hn::LoadU(F32(), x + i), &rest);
    hn::StoreU(rest, F32(), x + i);
    if constexpr (sizeof(T) == 4) {
      hn::StoreU(integers, I32(), reinterpret_cast<T*>(q) + i);
    } else {
      hn::StoreU(hn::DemoteTo(narrow, integers), narrow, reinterpret_cast<T*>(q) + i);
    }
  }
}

// Precondition of the reference, too: integers of `width` bytes hold `limit`, so that demotion saturates nothing.
void Quantize(float* x, size_t n, int exponent, int32_t limit, int width, uint8_t* q) {
  const Quantizer quantize(exponent, limit);
  const size_t whole = n / hn::Lanes(F32()) * hn::Lanes(F32());
  switch (width) {
    case 1:
      QuantizeAs<int8_t>(x, whole, quantize, q);
      break;
    case 2:
      QuantizeAs<int16_t>(x, whole, quantize, q);
      break;
    default:
      QuantizeAs<int32_t>(x, whole, quantize, q);
      break;
  }
  reference::Quantize(x + whole, n - whole, exponent, limit, width, q + whole * static_cast<size_t>(width));
}

#if HWY_HAVE_FLOAT64
// Of sums below 2^51, which float64 holds: behind 1.5 * 2^52 its last bits are an integer's. Blocks with others are
// left to the reference.
HWY_INLINE void SmallGridToMean(const int64_t* acc, size_t n, uint32_t contributors, float* out) {
  constexpr size_t kBlock = 1024;
  constexpr double kFirstInteger = 6755399441055744.0;  // 1.5 * 2^52
  constexpr int64_t kItsBits = 0x4338'0000'0000'0000;
  constexpr int64_t kBound = int64_t{1} << 51;
  const hn::ScalableTag<double> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::Rebind<float, decltype(d)> df;
  const auto unit = hn::Set(df, PowerOfTwo(-kGridBits));
  const auto count = hn::Set(df, static_cast<float>(contributors));
  const auto beyond = hn::Set(di, -2 * kBound);  // bits that a sum in range plus kBound has not
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t end = std::min(n, begin + kBlock);
    auto out_of_range = hn::Zero(di);
    size_t i = begin;
    for (; i + hn::Lanes(d) <= end; i += hn::Lanes(d)) {
      const auto sum = hn::LoadU(di, acc + i);
      out_of_range = hn::Or(out_of_range, hn::And(hn::Add(sum, hn::Set(di, kBound)), beyond));
      const auto exact = hn::Sub(hn::BitCast(d, hn::Add(sum, hn::Set(di, kItsBits))), hn::Set(d, kFirstInteger));
      hn::StoreU(hn::Div(hn::Mul(hn::DemoteTo(df, exact), unit), count), df, out + i);
    }
    const size_t redone = hn::AllTrue(di, hn::Eq(out_of_range, hn::Zero(di))) ? i : begin;
    reference::GridToMean(acc + redone, end - redone, contributors, out + redone);
  }
}
#endif

// AVX-512 converts int64 to float32 in one instruction, rounding once; nothing else does.
void GridToMean(const int64_t* acc, size_t n, uint32_t contributors, float* out) {
#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
  const hn::ScalableTag<int64_t> d64;
  const hn::Rebind<float, hn::ScalableTag<int64_t>> df;
  const float unit = PowerOfTwo(-kGridBits);
  const float count = static_cast<float>(contributors);
  const size_t whole = n / hn::Lanes(d64) * hn::Lanes(d64);
  for (size_t i = 0; i < whole; i += hn::Lanes(d64)) {
    const auto sum = hn::Vec<decltype(df)>{_mm512_cvtepi64_ps(hn::LoadU(d64, acc + i).raw)};
    hn::StoreU(hn::Div(hn::Mul(sum, hn::Set(df, unit)), hn::Set(df, count)), df, out + i);
  }
  reference::GridToMean(acc + whole, n - whole, contributors, out + whole);
#elif HWY_HAVE_FLOAT64
  SmallGridToMean(acc, n, contributors, out);
#else
  reference::GridToMean(acc, n, contributors, out);
#endif
}

// A value times 2^kGridBits is exact, and so is its rounded integer, which a float32 holds: neither needs 64 bits.
template <int width>
HWY_INLINE void FloatsToMeanAs(const uint8_t* values, size_t n, uint32_t contributors, float* out) {
  const F32 d;
  const VecF32 scale = hn::Set(d, PowerOfTwo(kGridBits));
  const VecF32 unit = hn::Set(d, PowerOfTwo(-kGridBits));
  const VecF32 count = hn::Set(d, static_cast<float>(contributors));
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    VecF32 value;
    if constexpr (width == 4) {
      value = hn::BitCast(d, hn::LoadU(U32(), reinterpret_cast<const uint32_t*>(values + 4 * i)));
    } else {
      const hn::Rebind<uint16_t, F32> narrow;
      const auto bits = hn::LoadU(narrow, reinterpret_cast<const uint16_t*>(values + 2 * i));
      value = hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(U32(), bits)));
    }
    const VecF32 sum = hn::Add(hn::Round(hn::Mul(value, scale)), hn::Zero(d));  // integers have no -0
    hn::StoreU(hn::Div(hn::Mul(sum, unit), count), d, out + i);
  }
  reference::FloatsToMean(values + width * i, width, n - i, contributors, out + i);
}

void FloatsToMean(const uint8_t* values, int width, size_t n, uint32_t contributors, float* out) {
  width == 4 ? FloatsToMeanAs<4>(values, n, contributors, out) : FloatsToMeanAs<2>(values, n, contributors, out);
}

#if HWY_TARGET != HWY_SCALAR && HWY_HAVE_FLOAT64
template <int width>
HWY_INLINE void AddFloatsAs(int64_t* acc, const uint8_t* values, size_t n, Sign sign) {
  const GridConverter to_grid;
  const VecI64 flip = hn::Set(I64(), sign == Sign::kSubtract ? -1 : 0);  // (v ^ flip) - flip is v or -v
  const size_t lanes = hn::Lanes(I64());
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const VecI64 v = hn::Sub(hn::Xor(to_grid(LoadFloats<width>(values + width * i)), flip), flip);
    hn::StoreU(hn::Add(hn::LoadU(I64(), acc + i), v), I64(), acc + i);
  }
  reference::AddFloats(acc + i, values + width * i, width, n - i, sign);
}
#endif

void AddFloats(int64_t* acc, const uint8_t* values, int width, size_t n, Sign sign) {
#if HWY_TARGET == HWY_SCALAR || !HWY_HAVE_FLOAT64
  reference::AddFloats(acc, values, width, n, sign);
#else
  return width == 4 ? AddFloatsAs<4>(acc, values, n, sign) : AddFloatsAs<2>(acc, values, n, sign);
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace gradwire::kernels
HWY_AFTER_NAMESPACE();

#endif  // include guard

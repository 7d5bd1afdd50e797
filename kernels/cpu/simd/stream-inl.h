// Stores that pass the caches: the first frame of a round overwrites an accumulator that is far larger than they are,
// and an ordinary store would read every line first. Re-included once per target.
#if defined(GRADWIRE_KERNELS_CPU_SIMD_STREAM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_KERNELS_CPU_SIMD_STREAM_INL_H_
#undef GRADWIRE_KERNELS_CPU_SIMD_STREAM_INL_H_
#else
#define GRADWIRE_KERNELS_CPU_SIMD_STREAM_INL_H_
#endif

#include <algorithm>

#include "hwy/cache_control.h"
#include "kernels/cpu/reference/loops.h"
#include "kernels/cpu/simd/common-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::kernels {
namespace HWY_NAMESPACE {

// Elements before the first one that a vector of D may be streamed to.
template <typename D, typename T>
HWY_INLINE size_t UnalignedHead(D d, const T* p, size_t n) {
  const size_t bytes = hn::Lanes(d) * sizeof(T);
  const size_t past = reinterpret_cast<uintptr_t>(p) % bytes;
  return past == 0 ? 0 : std::min(n, (bytes - past) / sizeof(T));
}

void AssignIntegers(int32_t* acc, const uint8_t* values, int width, size_t n) {
#if HWY_TARGET == HWY_SCALAR
  reference::AssignIntegers(acc, values, width, n);
#else
  if (width != 4) return reference::AssignIntegers(acc, values, width, n);
  const I32 d;
  const hn::Repartition<uint8_t, I32> bytes;
  const size_t lanes = hn::Lanes(d);
  size_t i = UnalignedHead(d, acc, n);
  reference::AssignIntegers(acc, values, width, i);
  for (; i + lanes <= n; i += lanes) hn::Stream(hn::BitCast(d, hn::LoadU(bytes, values + 4 * i)), d, acc + i);
  hwy::FlushStream();
  reference::AssignIntegers(acc + i, values + 4 * i, width, n - i);
#endif
}

bool AssignWords(int32_t* acc, const uint8_t* values, size_t n, const WordRange& range) {
#if HWY_TARGET == HWY_SCALAR
  return reference::AssignWords(acc, values, n, range);
#else
  const U32 d;
  const hn::Repartition<uint8_t, U32> bytes;
  const size_t lanes = hn::Lanes(d);
  size_t i = UnalignedHead(I32(), acc, n);
  bool inside = reference::AssignWords(acc, values, i, range);
  const VecU32 offset = hn::Set(d, range.offset);
  VecU32 largest = hn::Zero(d);
  for (; i + lanes <= n; i += lanes) {
    const VecU32 word = hn::BitCast(d, hn::LoadU(bytes, values + 4 * i));
    largest = hn::Max(largest, hn::Add(hn::ShiftLeftSame(word, range.shift), offset));
    hn::Stream(hn::BitCast(I32(), word), I32(), acc + i);
  }
  hwy::FlushStream();
  inside = hn::GetLane(hn::MaxOfLanes(d, largest)) <= range.last && inside;
  return reference::AssignWords(acc + i, values + 4 * i, n - i, range) && inside;
#endif
}

#if HWY_TARGET != HWY_SCALAR && HWY_HAVE_FLOAT64
template <int width>
HWY_INLINE void AssignFloatsAs(int64_t* acc, const uint8_t* values, size_t n) {
  const GridConverter to_grid;
  const size_t lanes = hn::Lanes(I64());
  size_t i = UnalignedHead(I64(), acc, n);
  reference::AssignFloats(acc, values, width, i);
  for (; i + lanes <= n; i += lanes) hn::Stream(to_grid(LoadFloats<width>(values + width * i)), I64(), acc + i);
  hwy::FlushStream();
  reference::AssignFloats(acc + i, values + width * i, width, n - i);
}
#endif

void AssignFloats(int64_t* acc, const uint8_t* values, int width, size_t n) {
#if HWY_TARGET == HWY_SCALAR || !HWY_HAVE_FLOAT64
  reference::AssignFloats(acc, values, width, n);
#else
  return width == 4 ? AssignFloatsAs<4>(acc, values, n) : AssignFloatsAs<2>(acc, values, n);
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace gradwire::kernels
HWY_AFTER_NAMESPACE();

#endif  // include guard

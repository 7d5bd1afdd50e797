// Threshold search and taking what is selected. Re-included once per target.
#if defined(GRADWIRE_KERNELS_CPU_SIMD_SELECT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_KERNELS_CPU_SIMD_SELECT_INL_H_
#undef GRADWIRE_KERNELS_CPU_SIMD_SELECT_INL_H_
#else
#define GRADWIRE_KERNELS_CPU_SIMD_SELECT_INL_H_
#endif

#include <algorithm>

#include "kernels/cpu/simd/bitmap.h"
#include "kernels/cpu/simd/bracket.h"
#include "kernels/cpu/simd/common-inl.h"
#include "kernels/math/select.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::kernels {
namespace HWY_NAMESPACE {

// Threshold search -------------------------------------------------------------------------------------------------

// One pass over x: counts the elements whose magnitude is at least bracket.high and collects the magnitudes in
// [low, high). Returns false when these do not fit.
HWY_INLINE bool CountAndCollect(const float* x, size_t n, Bracket* bracket) {
  const U32 d;
  const size_t lanes = hn::Lanes(d);
  const size_t part = n / kStreams / lanes * lanes;
  const VecU32 low = hn::Set(d, bracket->low);
  const VecU32 width = hn::Set(d, bracket->high - bracket->low);
  const VecI32 below_high = hn::Set(I32(), static_cast<int32_t>(bracket->high - 1));
  VecU32 above = hn::Zero(d);
  uint32_t* out = bracket->collected;
  uint32_t* const full = bracket->collected + bracket->capacity - kStreams * lanes;
  for (size_t i = 0; i < part; i += lanes) {
    VecU32 magnitude[kStreams];
    hn::Mask<U32> inside[kStreams];
    for (size_t s = 0; s < kStreams; ++s) {
      magnitude[s] = LoadMagnitudes(x + s * part + i);
      const auto is_above = hn::Gt(hn::BitCast(I32(), magnitude[s]), below_high);
      above = hn::Sub(above, hn::VecFromMask(d, hn::RebindMask(d, is_above)));
      inside[s] = hn::Lt(hn::Sub(magnitude[s], low), width);
    }
    const auto any = hn::Or(hn::Or(inside[0], inside[1]), hn::Or(inside[2], inside[3]));
    if (HWY_LIKELY(hn::AllFalse(d, any))) continue;
    if (HWY_UNLIKELY(out > full)) return false;
    for (size_t s = 0; s < kStreams; ++s) {
      hn::StoreU(hn::Compress(magnitude[s], inside[s]), d, out);
      out += hn::CountTrue(d, inside[s]);
    }
  }
  // A lane holds at most n / (lanes * kStreams) * kStreams counts; their sum may need 64 bits.
  uint64_t total = 0;
  HWY_ALIGN uint32_t counts[HWY_MAX_BYTES / sizeof(uint32_t)];
  hn::Store(above, d, counts);
  for (size_t lane = 0; lane < lanes; ++lane) total += counts[lane];
  for (size_t i = kStreams * part; i < n; ++i) {
    const uint32_t magnitude = FloatBits(x[i]) & 0x7FFFFFFFu;
    total += magnitude >= bracket->high;
    *out = magnitude;
    out += magnitude - bracket->low < bracket->high - bracket->low;
    if (out > full) return false;
  }
  bracket->above = total;
  bracket->inside = static_cast<size_t>(out - bracket->collected);
  return true;
}

// A sample brackets the threshold; one pass over all elements counts what lies above and collects what lies within, and
// the key is found among these. A bracket that was missed moves. Returns false if that did not work out.
bool FindThresholdByBracket(const float* x, size_t n, double wanted, Threshold* found) {
  BracketSearch search(x, n, wanted);
  while (Bracket* bracket = search.Next()) {
    if (!CountAndCollect(x, n, bracket)) return false;
    if (search.Finish(found)) return true;
  }
  return false;
}

// Selection --------------------------------------------------------------------------------------------------------

// Which of 64 elements have at least this magnitude: bit i for x[i].
HWY_INLINE uint64_t AtLeast64(const float* x, VecI32 least_minus_one) {
  const I32 d;
  const size_t lanes = hn::Lanes(d);
  uint64_t word = 0;
  for (size_t i = 0; i < 64; i += lanes) {
    const auto mask = hn::Gt(hn::BitCast(d, LoadMagnitudes(x + i)), least_minus_one);
    uint64_t bits = 0;
    hn::StoreMaskBits(d, mask, reinterpret_cast<uint8_t*>(&bits));
    word |= bits << i;
  }
  return word;
}

// Takes the selected among candidates of one block.
struct Taker {
  Taker(const SelectArgs& a, uint32_t first, uint32_t* p, int32_t* q, size_t size)
      : args(a), quantize(a.exponent, a.limit), first_position(first), positions(p), integers(q), room(size) {}

  // `indices`: count of them, within the block that begins at x[begin]; room for a vector behind them.
  HWY_INLINE void Take(float* x, size_t begin, uint32_t* indices, size_t count) {
    const I32 di;
    const U32 du;
    const size_t lanes = hn::Lanes(du);
    hn::StoreU(hn::Zero(du), du, indices + count);
    float* block = x + begin;
    const VecU32 base = hn::Set(du, first_position + static_cast<uint32_t>(begin));
    const VecU32 order_base =
        hn::Set(du, static_cast<uint32_t>((args.first_element + begin) * 0x9E3779B9ull) + args.phase);
    for (size_t i = 0; i < count; i += lanes) {
      const VecU32 index = hn::LoadU(du, indices + i);
      const VecF32 value = hn::GatherIndex(F32(), block, hn::BitCast(di, index));
      VecF32 rest;
      const VecI32 integer = quantize(value, &rest);
      const auto selected = Selected(MagnitudeBits(hn::BitCast(du, value)),
                                     hn::Add(order_base, hn::Mul(index, hn::Set(du, 0x9E3779B9u))));
      auto taken = hn::And(selected, hn::RebindMask(du, hn::Ne(integer, hn::Zero(di))));
      if (HWY_UNLIKELY(count - i < lanes)) taken = hn::And(taken, hn::FirstN(du, count - i));
      Append(hn::Compress(hn::Add(base, index), taken), hn::Compress(integer, hn::RebindMask(di, taken)),
             hn::CountTrue(du, taken));
      hn::StoreU(hn::IfThenElse(hn::RebindMask(F32(), taken), rest, value), F32(), rests + i);
    }
    for (size_t i = 0; i < count; ++i) block[indices[i]] = rests[i];
  }

  // select.h's IsSelected, of elements whose key is at least args.key.
  HWY_INLINE hn::Mask<U32> Selected(VecU32 magnitude, VecU32 order) const {
    const U32 d;
    const VecU32 key = hn::ShiftRight<kKeyShift>(magnitude);
    const auto above = hn::Gt(key, hn::Set(d, args.key));
    if (args.keep_below == 0) return above;
    auto tied = hn::And(hn::Eq(key, hn::Set(d, args.key)), hn::Ne(magnitude, hn::Zero(d)));
    if (args.keep_below <= 0xFFFFFFFFu) {
      tied = hn::And(tied, hn::Lt(order, hn::Set(d, static_cast<uint32_t>(args.keep_below))));
    }
    return hn::Or(above, tied);
  }

  HWY_INLINE void Append(VecU32 position, VecI32 integer, size_t count) {
    const U32 du;
    const I32 di;
    if (HWY_LIKELY(taken + hn::Lanes(du) <= room)) {
      hn::StoreU(position, du, positions + taken);
      hn::StoreU(integer, di, integers + taken);
    } else {
      HWY_ALIGN uint32_t p[HWY_MAX_BYTES / 4];
      HWY_ALIGN int32_t q[HWY_MAX_BYTES / 4];
      hn::Store(position, du, p);
      hn::Store(integer, di, q);
      std::memcpy(positions + taken, p, count * sizeof(uint32_t));
      std::memcpy(integers + taken, q, count * sizeof(int32_t));
    }
    taken += count;
  }

  static constexpr size_t kBlockWords = 64;

  const SelectArgs args;
  const Quantizer quantize;
  const uint32_t first_position;
  uint32_t* const positions;
  int32_t* const integers;
  const size_t room;
  size_t taken = 0;
  float rests[kBlockWords * 64 + HWY_MAX_BYTES / sizeof(float)];
};

// In stretches that stay in the L2 cache: first a bitmap of what may be selected, then the work on that alone.
size_t TakeSelected(float* x, size_t n, const SelectArgs& args, uint32_t first_position, uint32_t* positions,
                    int32_t* integers) {
  constexpr size_t kStretchWords = 1024;
  constexpr size_t kPartWords = kStretchWords / kStreams;
  const VecI32 least = hn::Set(I32(), static_cast<int32_t>((args.key << kKeyShift) - 1));  // -1 for key 0: all
  Taker taker(args, first_position, positions, integers, n);
  uint64_t words[kStretchWords];
  uint32_t indices[Taker::kBlockWords * 64 + kIndexRoom + HWY_MAX_BYTES / sizeof(uint32_t)];
  for (size_t stretch = 0; stretch < n; stretch += kStretchWords * 64) {
    const size_t length = std::min(kStretchWords * 64, n - stretch);
    const size_t whole = length / 64;
    if (whole == kStretchWords) {
      for (size_t w = 0; w < kPartWords; ++w) {
        for (size_t s = 0; s < kStreams; ++s) {
          const size_t word = s * kPartWords + w;
          words[word] = AtLeast64(x + stretch + word * 64, least);
        }
      }
    } else {
      for (size_t w = 0; w < whole; ++w) words[w] = AtLeast64(x + stretch + w * 64, least);
      if (length % 64 != 0) {
        float last[64] = {};
        std::memcpy(last, x + stretch + whole * 64, length % 64 * sizeof(float));
        words[whole] = AtLeast64(last, least) & ((uint64_t{1} << (length % 64)) - 1);
      }
    }
    const size_t used = (length + 63) / 64;
    for (size_t w = 0; w < used; w += Taker::kBlockWords) {
      const size_t count = IndicesOf(words + w, std::min(Taker::kBlockWords, used - w), indices);
      if (count != 0) taker.Take(x, stretch + w * 64, indices, count);
    }
  }
  return taker.taken;
}

}  // namespace HWY_NAMESPACE
}  // namespace gradwire::kernels
HWY_AFTER_NAMESPACE();

#endif  // include guard

// Threshold search and taking what is selected. Re-included once per target.
#if defined(GRADWIRE_KERNELS_CPU_SIMD_SELECT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_KERNELS_CPU_SIMD_SELECT_INL_H_
#undef GRADWIRE_KERNELS_CPU_SIMD_SELECT_INL_H_
#else
#define GRADWIRE_KERNELS_CPU_SIMD_SELECT_INL_H_
#endif

#include <algorithm>

#include "kernels/cpu/bitmap.h"
#include "kernels/cpu/simd/bracket.h"
#include "kernels/cpu/simd/common-inl.h"
#include "kernels/math/select.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::kernels {
namespace HWY_NAMESPACE {

// Bitmaps of elements -------------------------------------------------------------------------------------------------

// Which of 64 elements have at least this magnitude: bit i for x[i].
HWY_INLINE uint64_t AtLeast64(const float* x, VecI32 least_minus_one) {
  const I32 d;
  const size_t lanes = hn::Lanes(d);
  uint64_t word = 0;
  for (size_t i = 0; i < 64; i += lanes) {
    const auto mask = hn::Gt(hn::BitCast(d, LoadMagnitudes(x + i)), least_minus_one);
    word |= BitsOf(d, mask) << i;
  }
  return word;
}

// A bitmap of which of n elements have at least this magnitude. Many places at once; near ones, where n is small, lie
// in the cache already or are read once.
HWY_INLINE void MarkCandidates(const float* x, size_t n, VecI32 least_minus_one, uint64_t* words) {
  const size_t whole = n / 64;
  const size_t part = whole / kStreams;
  for (size_t w = 0; w < part; ++w) {
    HWY_UNROLL(8)
    for (size_t s = 0; s < kStreams; ++s) words[s * part + w] = AtLeast64(x + (s * part + w) * 64, least_minus_one);
  }
  for (size_t w = kStreams * part; w < whole; ++w) words[w] = AtLeast64(x + w * 64, least_minus_one);
  if (n % 64 == 0) return;
  float last[64] = {};
  std::memcpy(last, x + whole * 64, n % 64 * sizeof(float));
  words[whole] = AtLeast64(last, least_minus_one) & ((uint64_t{1} << (n % 64)) - 1);
}

void MarkAtLeast(const float* x, size_t n, uint32_t least, uint64_t* words) {
  MarkCandidates(x, n, hn::Set(I32(), static_cast<int32_t>(least) - 1), words);
}

// An index for each bit of a bitmap. cpu:avx2 is to be what machines without AVX-512 have.
inline constexpr auto kIndicesOf = HWY_TARGET == HWY_AVX3 ? &IndicesOf : &IndicesByBit;

// Threshold search -------------------------------------------------------------------------------------------------

// Bounds of a bracket for signed comparison: magnitudes are below 2^31.
struct BracketLanes {
  VecI32 below_low, below_high;
};

HWY_INLINE VecI32 SignedMagnitudes(const float* x) { return hn::BitCast(I32(), LoadMagnitudes(x)); }

// Lines that are visited together: at(i) is the address of the i-th of their elements and those behind it in its line.
struct OfLines {
  const float* lines[kVisit / kSampleLine];
  HWY_INLINE const float* at(size_t i) const { return lines[i / kSampleLine] + i % kSampleLine; }
};

// Adds to `above` (per lane) how many elements of a visit lie above the bracket; true if some lie within.
HWY_INLINE bool CountVisit(const OfLines& visit, BracketLanes bracket, VecI32* above) {
  const I32 d;
  VecI32 count = *above;
  auto any = hn::FirstN(d, 0);
  for (size_t i = 0; i < kVisit; i += hn::Lanes(d)) {
    const VecI32 magnitude = SignedMagnitudes(visit.at(i));
    const auto is_above = hn::Gt(magnitude, bracket.below_high);
    count = hn::Sub(count, hn::VecFromMask(d, is_above));
    any = hn::Or(any, hn::AndNot(is_above, hn::Gt(magnitude, bracket.below_low)));
  }
  *above = count;
  return !hn::AllFalse(d, any);
}

// Appends the magnitudes of a visit that lie within.
HWY_INLINE uint32_t* CollectVisit(const OfLines& visit, BracketLanes bracket, uint32_t* out) {
  const I32 d;
  for (size_t i = 0; i < kVisit; i += hn::Lanes(d)) {
    const VecI32 magnitude = SignedMagnitudes(visit.at(i));
    const auto within = hn::AndNot(hn::Gt(magnitude, bracket.below_high), hn::Gt(magnitude, bracket.below_low));
    hn::StoreU(hn::BitCast(U32(), CompressLanes(d, magnitude, within)), U32(), out);
    out += hn::CountTrue(d, within);
  }
  return out;
}

HWY_INLINE uint64_t SumOfLanes(VecI32 counts) {
  HWY_ALIGN int32_t lane[HWY_MAX_BYTES / sizeof(int32_t)];
  hn::Store(counts, I32(), lane);
  uint64_t total = 0;
  for (size_t i = 0; i < hn::Lanes(I32()); ++i) total += static_cast<uint32_t>(lane[i]);
  return total;
}

// One pass, over all elements or those of a sample.
class BracketPass {
 public:
  BracketPass(const float* x, const LineSample& among, Bracket* bracket)
      : x_(x),
        among_(among),
        bracket_(*bracket),
        bounds_{hn::Set(I32(), static_cast<int32_t>(bracket->low - 1)),
                hn::Set(I32(), static_cast<int32_t>(bracket->high - 1))},
        counts_(hn::Zero(I32())),
        out_(bracket->collected),
        full_(bracket->collected + bracket->capacity - kStreams * kVisit) {}

  // Returns false when what lies within the bracket does not fit.
  HWY_INLINE bool Run() {
    const size_t visited = among_.stride == 1 ? VisitAll() : VisitLines();
    if (!fits_ || out_ > full_) return false;
    uint64_t above = above_ + SumOfLanes(counts_);
    for (size_t i = visited; i < among_.size; ++i) {  // less than kStreams * kVisit
      const uint32_t magnitude = FloatBits(x_[among_.At(i)]) & 0x7FFFFFFFu;
      above += magnitude >= bracket_.high;
      *out_ = magnitude;
      out_ += magnitude - bracket_.low < bracket_.high - bracket_.low;
    }
    bracket_.above = above;
    bracket_.inside = static_cast<size_t>(out_ - bracket_.collected);
    return true;
  }

 private:
  static constexpr size_t kStretch = 8;  // visits of each stream; with 32, reading from memory takes half as long again

  // Both stop where the room ends, and else return how many elements they have visited. VisitAll: what lies within is
  // collected behind the reading of a stretch. A branch on what was just read would wait for memory where it is
  // mispredicted.
  HWY_INLINE size_t VisitAll() {
    const size_t part = among_.size / kStreams / kVisit;  // visits
    uint64_t within[kStretch * kStreams], visits[kStretch * kStreams];
    for (size_t begin = 0; begin < part && fits_; begin += kStretch) {
      const size_t end = std::min(begin + kStretch, part);
      size_t found = 0;
      for (size_t v = begin; v < end; ++v) {
        // Unrolled, each stream has loads of its own, whose strides the processor foresees.
        HWY_UNROLL(8)
        for (size_t s = 0; s < kStreams; ++s) {
          const size_t visit = s * part + v;
          const uint64_t above = AtLeast64(x_ + visit * kVisit, bounds_.below_high);
          above_ += hwy::PopCount(above);
          within[found] = AtLeast64(x_ + visit * kVisit, bounds_.below_low) & ~above;
          visits[found] = visit;
          found += within[found] != 0 ? 1 : 0;
        }
      }
      Collect(visits, within, found);
    }
    return kStreams * part * kVisit;
  }
  // Appends the magnitudes of the elements of these visits whose bits are set.
  HWY_INLINE void Collect(const uint64_t* visits, const uint64_t* words, size_t count) {
    uint32_t indices[kStretch * kStreams * 64 + kIndexRoom];
    const size_t found = kIndicesOf(words, count, 0, indices);
    fits_ = found <= static_cast<size_t>(full_ - out_);
    for (size_t i = 0; fits_ && i < found; ++i) {
      *out_++ = FloatBits(x_[visits[indices[i] / 64] * kVisit + indices[i] % 64]) & 0x7FFFFFFFu;
    }
  }
  // No two lines are neighbours, so what is visited next must be asked for by hand.
  HWY_INLINE size_t VisitLines() {
    constexpr size_t kLines = kVisit / kSampleLine;
    constexpr size_t kAhead = 4;  // visits; a power of two
    const size_t visits = among_.size / kVisit;
    OfLines ring[kAhead];
    const auto ask = [&](size_t v) HWY_ATTR {
      for (size_t k = 0; k < kLines; ++k) {
        const float* const line = x_ + among_.LineAt(v * kLines + k) * kSampleLine;
        ring[v % kAhead].lines[k] = line;
        __builtin_prefetch(line);
        __builtin_prefetch(line + kSampleLine - 1);
      }
    };
    for (size_t v = 0; v < std::min(kAhead, visits); ++v) ask(v);
    for (size_t v = 0; v < visits && out_ <= full_; ++v) {
      const OfLines visit = ring[v % kAhead];
      if (v + kAhead < visits) ask(v + kAhead);
      if (HWY_UNLIKELY(CountVisit(visit, bounds_, &counts_))) out_ = CollectVisit(visit, bounds_, out_);
    }
    return visits * kVisit;
  }

  const float* const x_;
  const LineSample& among_;
  Bracket& bracket_;
  const BracketLanes bounds_;
  VecI32 counts_;
  uint64_t above_ = 0;  // beside counts_
  uint32_t* out_;
  uint32_t* const full_;
  bool fits_ = true;
};

// A sample brackets the threshold; one pass over all elements (or a larger sample) counts what lies above and collects
// what lies within, and the key is found among these. A bracket that was missed moves. Returns false if that did not
// work out.
bool FindThresholdByBracket(const float* x, const LineSample& among, Threshold* found) {
  BracketSearch search(x, among);
  while (Bracket* bracket = search.Next()) {
    if (!BracketPass(x, among, bracket).Run()) return false;
    if (search.Finish(found)) return true;
  }
  return false;
}

// Selection --------------------------------------------------------------------------------------------------------

// What of the arguments the vectors need.
struct SelectLanes {
  explicit SelectLanes(const SelectArgs& args)
      : quantize(args.exponent, args.limit),
        key(hn::Set(U32(), args.key)),
        keep_below(hn::Set(U32(), static_cast<uint32_t>(args.keep_below))),
        keep_all(args.keep_below > 0xFFFFFFFFu) {}

  // select.h's IsSelected, of elements whose key is at least the threshold's.
  HWY_INLINE hn::Mask<U32> Selected(VecU32 magnitude, VecU32 order) const {
    const VecU32 own = hn::ShiftRight<kKeyShift>(magnitude);
    auto tied = hn::And(hn::Eq(own, key), hn::Ne(magnitude, hn::Zero(U32())));
    if (!keep_all) tied = hn::And(tied, hn::Lt(order, keep_below));
    return hn::Or(hn::Gt(own, key), tied);
  }

  const Quantizer quantize;
  const VecU32 key, keep_below;
  const bool keep_all;
};

// Where taken elements are appended.
struct Taken {
  uint32_t* positions;
  int32_t* integers;
  size_t room;
  size_t count = 0;
};

HWY_INLINE void Append(VecU32 position, VecI32 integer, size_t count, Taken* taken) {
  const U32 du;
  const I32 di;
  uint32_t* const p = taken->positions + taken->count;
  int32_t* const q = taken->integers + taken->count;
  if (HWY_LIKELY(taken->count + hn::Lanes(du) <= taken->room)) {
    hn::StoreU(position, du, p);
    hn::StoreU(integer, di, q);
  } else {
    HWY_ALIGN uint32_t last_p[HWY_MAX_BYTES / sizeof(uint32_t)];
    HWY_ALIGN int32_t last_q[HWY_MAX_BYTES / sizeof(int32_t)];
    hn::Store(position, du, last_p);
    hn::Store(integer, di, last_q);
    std::memcpy(p, last_p, count * sizeof(uint32_t));
    std::memcpy(q, last_q, count * sizeof(int32_t));
  }
  taken->count += count;
}

inline constexpr size_t kBlockWords = 64;  // candidates are worked on by blocks of this many words of the bitmap

// What is read next: its lines are asked for beside the work on candidates, with each vector of these as many lines as
// a tenth taken has it read.
class ReadAhead {
 public:
  HWY_INLINE ReadAhead(const float* begin, size_t n) : begin_(begin), size_(n) {}
  HWY_INLINE void Ask() {
    constexpr size_t kElements = 10 * HWY_MAX_BYTES / sizeof(float);
    if (size_ - asked_ < kElements) return;
    for (size_t i = 0; i < kElements; i += kSampleLine) __builtin_prefetch(begin_ + asked_ + i, 0, 2);
    asked_ += kElements;
  }

 private:
  const float* begin_;
  size_t size_, asked_ = 0;
};

// Takes the selected of one block's candidates: `indices` (count of them, room for a vector behind), within `block`.
// `position` and `order`: of block[0].
HWY_INLINE void TakeCandidates(float* block, uint32_t* indices, size_t count, uint32_t position, uint32_t order,
                               const SelectLanes& lanes, ReadAhead* ahead, Taken* taken) {
  const I32 di;
  const U32 du;
  const size_t step = hn::Lanes(du);
  HWY_ALIGN float rests[kBlockWords * 64 + HWY_MAX_BYTES / sizeof(float)];
  hn::StoreU(hn::Zero(du), du, indices + count);
  Taken local = *taken;
  ReadAhead asked = *ahead;
  for (size_t i = 0; i < count; i += step) {
    asked.Ask();
    const VecU32 index = hn::LoadU(du, indices + i);
    const VecF32 value = hn::GatherIndex(F32(), block, hn::BitCast(di, index));
    VecF32 rest;
    const VecI32 integer = lanes.quantize(value, &rest);
    auto mask = lanes.Selected(MagnitudeBits(hn::BitCast(du, value)),
                               hn::Add(hn::Set(du, order), hn::Mul(index, hn::Set(du, 0x9E3779B9u))));
    mask = hn::And(mask, hn::RebindMask(du, hn::Ne(integer, hn::Zero(di))));
    if (HWY_UNLIKELY(count - i < step)) mask = hn::And(mask, hn::FirstN(du, count - i));
    Append(CompressLanes(du, hn::Add(hn::Set(du, position), index), mask),
           CompressLanes(di, integer, hn::RebindMask(di, mask)), hn::CountTrue(du, mask), &local);
    hn::Store(hn::IfThenElse(hn::RebindMask(F32(), mask), rest, value), F32(), rests + i);
  }
  *taken = local;
  *ahead = asked;
  for (size_t i = 0; i < count; ++i) block[indices[i]] = rests[i];
}

// In stretches that stay in the L2 cache: first a bitmap of what may be selected, then the work on that alone. Where
// there is little of it, stretches are long, since many places at once are read fastest; where there is much, they are
// short, and the next one is read beside the work.
size_t TakeSelected(float* x, size_t n, const SelectArgs& args, uint32_t first_position, uint32_t* positions,
                    int32_t* integers) {
  constexpr size_t kLong = 2048 * 64;  // elements
  constexpr size_t kShort = 256 * 64;
  constexpr size_t kMuch = 25;  // one candidate of so many elements
  // Zero is never selected, so key 0 has no fewer candidates than what is not 0.
  const VecI32 least = hn::Set(I32(), args.key == 0 ? 0 : static_cast<int32_t>((args.key << kKeyShift) - 1));
  const SelectLanes lanes(args);
  const uint32_t first_order = static_cast<uint32_t>(args.first_element * 0x9E3779B9ull) + args.phase;
  Taken taken = {positions, integers, n};
  uint64_t words[kLong / 64];
  uint32_t indices[kBlockWords * 64 + kIndexRoom + HWY_MAX_BYTES / sizeof(uint32_t)];
  size_t length = 0;
  bool much = true;
  for (size_t stretch = 0; stretch < n; stretch += length) {
    length = std::min(much ? kShort : kLong, n - stretch);
    MarkCandidates(x + stretch, length, least, words);
    const size_t next = stretch + length;
    ReadAhead ahead(x + next, much ? std::min(kShort, n - next) : 0);
    size_t candidates = 0;
    for (size_t begin = 0; begin < length; begin += kBlockWords * 64) {
      const size_t block_words = (std::min(kBlockWords * 64, length - begin) + 63) / 64;
      const size_t count = kIndicesOf(words + begin / 64, block_words, 0, indices);
      if (count == 0) continue;
      candidates += count;
      const uint32_t at = static_cast<uint32_t>(stretch + begin);
      TakeCandidates(x + at, indices, count, first_position + at, first_order + at * 0x9E3779B9u, lanes, &ahead,
                     &taken);
    }
    much = candidates * kMuch >= length;
  }
  return taken.count;
}

}  // namespace HWY_NAMESPACE
}  // namespace gradwire::kernels
HWY_AFTER_NAMESPACE();

#endif  // include guard

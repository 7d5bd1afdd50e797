// See levels.h.
#include "common/codec/homomorphic/levels.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "common/codec/bits/draw.h"
#include "common/codec/bits/reductions.h"
#include "common/codec/homomorphic/hadamard.h"
#include "common/codec/homomorphic/thc_table.h"
#include "kernels/cpu/reference/clones.h"
#include "kernels/math/math.h"

namespace gradwire::homomorphic {
namespace {

float* Room(std::vector<float>* memory, size_t n) {
  if (memory->size() < n) memory->resize(n);
  return memory->data();
}

// Within +-limit, whatever x is.
inline __attribute__((always_inline)) float Clamped(float x, float limit) {
  return std::min(limit, std::max(-limit, x));  // in this order NaN becomes a limit
}

GW_CLONES void EncodeNearest(const float* x, size_t n, float inverse, float limit, uint8_t* levels) {
  for (size_t i = 0; i < n; ++i) {
    const float scaled = Clamped(x[i] * inverse, limit);
    levels[i] = static_cast<uint8_t>(static_cast<int32_t>(kernels::RoundToEven(scaled) + limit));
  }
}

// Up from the level below by a chance that is the distance from it.
GW_CLONES void EncodeByChance(const float* x, size_t n, float inverse, float limit, uint64_t salt, uint8_t* levels) {
  for (size_t i = 0; i < n; ++i) {
    const float scaled = Clamped(x[i] * inverse, limit) + limit;
    const int32_t low = static_cast<int32_t>(scaled);
    levels[i] = static_cast<uint8_t>(low + static_cast<int32_t>(UnitDraw(salt, i) < scaled - static_cast<float>(low)));
  }
}

GW_CLONES void AddLevels(const uint8_t* levels, size_t n, int32_t zero, int32_t sign, int32_t* sums) {
  for (size_t i = 0; i < n; ++i) sums[i] += sign * (static_cast<int32_t>(levels[i]) - zero);
}

GW_CLONES void ScaleSums(const int32_t* sums, size_t n, float unit, float contributors, float* out) {
  for (size_t i = 0; i < n; ++i) out[i] = static_cast<float>(sums[i]) * unit / contributors;
}

// Even levels from minus to plus the range: an integer times range / limit.
class Uniform final : public Levels {
 public:
  explicit Uniform(const HomomorphicSpec& spec)
      : bits_(static_cast<int>(spec.bits)),
        limit_((1 << (bits_ - 1)) - 1),
        nearest_(spec.rounding == HomomorphicSpec::Rounding::kNearest) {}
  size_t PositionsOf(size_t n) const override { return n; }
  int bits() const override { return bits_; }
  int32_t LargestInteger() const override { return limit_; }
  bool keeps_rest() const override { return nearest_; }
  bool keeps_zeros() const override { return true; }
  int RangeOfRun(const float* x, size_t n) const override {
    return RangeOf(static_cast<double>(LargestMagnitude(x, n)));
  }
  void Encode(const float* x, size_t n, int range, uint64_t, uint64_t own, Scratch*, uint8_t* levels) const override {
    const float inverse = static_cast<float>(limit_ / MagnitudeOf(range));
    if (nearest_) {
      EncodeNearest(x, n, inverse, static_cast<float>(limit_), levels);
    } else {
      EncodeByChance(x, n, inverse, static_cast<float>(limit_), own, levels);
    }
  }
  bool Valid(const uint8_t* levels, size_t positions) const override {
    uint8_t largest = 0;
    for (size_t i = 0; i < positions; ++i) largest = std::max(largest, levels[i]);
    return largest <= 2 * limit_;
  }
  void Add(const uint8_t* levels, size_t positions, int sign, int32_t* sums) const override {
    AddLevels(levels, positions, limit_, sign, sums);
  }
  void Means(const int32_t* sums, size_t n, int range, uint64_t, uint32_t contributors, Scratch*,
             float* out) const override {
    ScaleSums(sums, n, static_cast<float>(MagnitudeOf(range) / limit_), static_cast<float>(contributors), out);
  }

 private:
  const int bits_;
  const int32_t limit_;
  const bool nearest_;
};

// Signs of the rotation: bit i % 32 of draw i / 32 turns element i.
GW_CLONES void Turn(const float* x, size_t n, uint64_t salt, float* out) {
  for (size_t first = 0; first < n; first += 32) {
    const uint32_t signs = DrawBits(salt, first / 32);
    const size_t count = std::min<size_t>(32, n - first);
    for (size_t i = 0; i < count; ++i) {
      out[first + i] = kernels::FloatFromBits(kernels::FloatBits(x[first + i]) ^ (signs >> i & 1) << 31);
    }
  }
}

// y / unit + half within [0, 2 half], and what chance adds to it.
GW_CLONES void ScaleRotated(const float* y, size_t n, float inverse, float half, uint64_t salt, float* scaled,
                            float* draws) {
  for (size_t i = 0; i < n; ++i) {
    scaled[i] = Clamped(y[i] * inverse, half) + half;
    draws[i] = UnitDraw(salt, i);
  }
}

GW_CLONES void MeansOfTurned(const float* y, size_t n, float unit, float contributors, float* out) {
  for (size_t i = 0; i < n; ++i) out[i] = y[i] * unit / contributors;
}

GW_CLONES void ToFloats(const int32_t* sums, size_t n, float* out) {
  for (size_t i = 0; i < n; ++i) out[i] = static_cast<float>(sums[i]);
}

// THC (Li et al., NSDI 2024): a run is rotated by a randomised Hadamard transform, which makes its numbers nearly
// normal (section 4.2); each becomes an entry of a table of integers, by chance (4.3); sums of entries are rotated
// back. Range: the root mean square of a run, times the t of the table.
class Thc final : public Levels {
 public:
  explicit Thc(const HomomorphicSpec& spec)
      : bits_(static_cast<int>(spec.bits)),
        half_(static_cast<int32_t>(spec.granularity / 2)),
        reach_(NormalRange(spec.p)),
        table_(ThcTable(spec.bits, spec.granularity, spec.p)),
        below_(spec.granularity + 1) {
    uint8_t level = 0;
    for (int32_t value = -half_; value <= half_; ++value) {
      if (level + size_t{1} < table_.size() && table_[level + 1u] <= value) ++level;
      const bool last = level + size_t{1} == table_.size();
      const int32_t at = value + half_;
      below_[static_cast<size_t>(at)] = {static_cast<float>(table_[level] + half_),
                                         last ? 1.0f : static_cast<float>(table_[level + 1u] - table_[level]), level};
    }
  }
  size_t PositionsOf(size_t n) const override { return std::bit_ceil(n); }
  int bits() const override { return bits_; }
  int32_t LargestInteger() const override { return half_; }
  bool keeps_rest() const override { return true; }
  bool keeps_zeros() const override { return false; }
  int RangeOfRun(const float* x, size_t n) const override {
    return RangeOf(std::sqrt(SumOfSquares(x, n) / static_cast<double>(PositionsOf(n))));
  }
  void Encode(const float* x, size_t n, int range, uint64_t shared, uint64_t own, Scratch* scratch,
              uint8_t* levels) const override {
    const size_t d = PositionsOf(n);
    float* const y = Room(&scratch->a, d);
    float* const scaled = Room(&scratch->b, 2 * d);
    float* const draws = scaled + d;
    Turn(x, n, shared, y);
    std::fill(y + n, y + d, 0.0f);
    Hadamard(y, d);
    ScaleRotated(y, d, static_cast<float>(1 / (UnitOf(range, d) * static_cast<double>(d))), static_cast<float>(half_),
                 own, scaled, draws);
    const Below* const table = below_.data();
    for (size_t i = 0; i < d; ++i) {
      const Below& below = table[static_cast<int32_t>(scaled[i])];
      levels[i] = static_cast<uint8_t>(below.level + (draws[i] * below.gap < scaled[i] - below.start));
    }
  }
  bool Valid(const uint8_t*, size_t) const override { return true; }  // the table has 2^bits entries
  void Add(const uint8_t* levels, size_t positions, int sign, int32_t* sums) const override {
    for (size_t i = 0; i < positions; ++i) sums[i] += sign * table_[levels[i]];
  }
  void Means(const int32_t* sums, size_t n, int range, uint64_t shared, uint32_t contributors, Scratch* scratch,
             float* out) const override {
    const size_t d = PositionsOf(n);
    float* const y = Room(&scratch->a, d);
    ToFloats(sums, d, y);
    Hadamard(y, d);
    MeansOfTurned(y, n, static_cast<float>(UnitOf(range, d)), static_cast<float>(contributors), out);
    Turn(out, n, shared, out);
  }

 private:
  // The greatest entry that is not above an integer, from 0; its distance to the next; its level.
  struct Below {
    float start;
    float gap;
    uint8_t level;
  };
  // What 1 of the table is worth in the elements, of d that were rotated: reach * root mean square / half, and the
  // transform's factor of 1 / sqrt(d).
  double UnitOf(int range, size_t d) const {
    return reach_ * MagnitudeOf(range) / (half_ * std::sqrt(static_cast<double>(d)));
  }

  const int bits_;
  const int32_t half_;
  const double reach_;
  const std::vector<int8_t> table_;
  std::vector<Below> below_;
};

}  // namespace

int RangeOf(double magnitude) {
  int range = kLeastRange;
  while (range < kLargestRange && magnitude > MagnitudeOf(range)) ++range;
  return range;
}

double MagnitudeOf(int range) {
  const double root = range % 2 == 0 ? 1.0 : 1.4142135623730951;  // sqrt(2)
  return std::ldexp(root, (range - (range % 2 != 0)) / 2);
}

std::unique_ptr<Levels> MakeLevels(const HomomorphicSpec& spec) {
  if (spec.scheme == HomomorphicSpec::Scheme::kThc) return std::make_unique<Thc>(spec);
  return std::make_unique<Uniform>(spec);
}

}  // namespace gradwire::homomorphic

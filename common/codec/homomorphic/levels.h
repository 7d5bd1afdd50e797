// The numbers of one run as levels of a range that all workers have agreed on, whose sums can be read like the levels
// themselves. Definitions and sources: common/codec/README.md; bytes: proto/WIRE.md, "Levels".
//
// A range is an integer r that stands for the magnitude 2^(r/2); the plan's exponents are such ranges. At kLeastRange,
// and where nothing was agreed on, nothing can be sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/job/codec_spec.h"

namespace gradwire::homomorphic {

inline constexpr int kLeastRange = -80;
inline constexpr int kLargestRange = 46;

// The least range, of those above, whose magnitude is not below `magnitude`.
int RangeOf(double magnitude);
double MagnitudeOf(int range);

// Memory of one caller, kept from run to run.
struct Scratch {
  std::vector<float> a, b;
};

// Immutable, thread-safe. In all of these n > 0 is the number of elements of the run, `levels` and `sums` have
// PositionsOf(n) entries, and range > kLeastRange.
class Levels {
 public:
  virtual ~Levels() = default;
  // n, or more where a run is transformed as a whole.
  virtual size_t PositionsOf(size_t n) const = 0;
  virtual int bits() const = 0;
  // Magnitude of the integers that levels stand for, at most 127.
  virtual int32_t LargestInteger() const = 0;
  // Whether the worker keeps what a frame does not say; else only what lies beyond the range.
  virtual bool keeps_rest() const = 0;

  // Whether a run of zeros stands for zeros at any range; else chance puts something there.
  virtual bool keeps_zeros() const = 0;

  // What a worker asks for; x is finite.
  virtual int RangeOfRun(const float* x, size_t n) const = 0;
  // `shared`, `own`: salts of all workers (SharedSalt) and of this one.
  virtual void Encode(const float* x, size_t n, int range, uint64_t shared, uint64_t own, Scratch* scratch,
                      uint8_t* levels) const = 0;
  // False for a level that Encode never writes.
  virtual bool Valid(const uint8_t* levels, size_t positions) const = 0;
  // sums[i] += sign * integer of levels[i].
  virtual void Add(const uint8_t* levels, size_t positions, int sign, int32_t* sums) const = 0;
  // What sums over `contributors` workers mean, n values. Deterministic.
  virtual void Means(const int32_t* sums, size_t n, int range, uint64_t shared, uint32_t contributors, Scratch* scratch,
                     float* out) const = 0;
};

std::unique_ptr<Levels> MakeLevels(const HomomorphicSpec& spec);

}  // namespace gradwire::homomorphic

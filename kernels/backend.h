// The arithmetic of the hot path behind one interface, chosen once at start.
// kernels/math holds the scalar, host+device definition of every operation; a backend applies it to arrays. All
// backends give the same bits. Pointers are in the backend's memory (Allocate); on the CPU that is any memory.
// Operations on one stream run in order. They may be asynchronous; Synchronize waits for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/math/grid.h"
#include "kernels/math/optimizer.h"
#include "kernels/math/select.h"

namespace gradwire::kernels {

namespace cuda {
class AsyncBackend;
}

// Opaque; the CPU backend has none and executes at once.
struct Stream;

enum class Sign : int { kAdd = 1, kSubtract = -1 };

// Which elements of one run are taken, and how they are quantised (math/select.h, math/fixed_point.h).
struct SelectArgs {
  uint32_t key = 0;
  uint64_t keep_below = 0;     // of 2^32
  uint32_t phase = 0;          // TiePhase
  uint64_t first_element = 0;  // of x[0], within its tensor
  int exponent = 0;            // kMinExponent to kMaxExponent
  int32_t limit = 0;
};

// Where selection begins: keys above `key`, and of those equal to it the share keep_below of 2^32 (math/select.h).
struct Threshold {
  uint32_t key = 0;
  uint64_t keep_below = 0;
};

// Geometry of a sketch: groups * cells_per_group cells, one group after the other (math/sketch.h).
struct SketchArgs {
  uint64_t salt = 0;
  uint32_t groups = 0;
  uint32_t cells_per_group = 0;  // a multiple of 3
  int cell_bytes = 1;            // 1, 2, 4
};

// Words w with (w << shift) + offset <= last, in Z/2^32.
struct WordRange {
  int shift;
  uint32_t offset;
  uint32_t last;
  // Integers of magnitude up to `limit` (less than 2^31).
  static constexpr WordRange Integers(int32_t limit) {
    return {0, static_cast<uint32_t>(limit), 2 * static_cast<uint32_t>(limit)};
  }
  // float32 whose magnitude has bits below `limit_bits` (1 to 2^31 - 1): the sign is shifted out.
  static constexpr WordRange Floats(uint32_t limit_bits) { return {1, 0, 2 * limit_bits - 1}; }
  constexpr bool Holds(uint32_t word) const { return (word << shift) + offset <= last; }
};

// Thread-safe: concurrent calls must not write the same memory.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const = 0;
  virtual bool host_memory() const = 0;  // true: host pointers may be passed as they are
  // The interface of a backend over a device's memory; null where host_memory().
  virtual cuda::AsyncBackend* async() { return nullptr; }

  // Dense merging -------------------------------------------------------------------------------------------------
  // acc[i] += sign * value[i] in Z/2^32. `values`: little-endian two's complement of `width` bytes (1, 2, 4), any
  // alignment.
  virtual void AddIntegers(int32_t* acc, const uint8_t* values, int width, size_t n, Sign sign, Stream* stream) = 0;
  // acc[i] = value[i]: the first of several additions, without reading what was there.
  virtual void AssignIntegers(int32_t* acc, const uint8_t* values, int width, size_t n, Stream* stream) = 0;
  // acc[i] = the 4-byte word values[i], whatever it means, in host memory. Returns whether every word is in `range`;
  // all words are stored in either case. So what is received for the first time is checked and stored in one pass.
  virtual bool AssignWords(int32_t* acc, const uint8_t* values, size_t n, const WordRange& range);
  // acc[i] += sign * round_to_even(value[i] * 2^kGridBits) in Z/2^64. `values`: float32 (width 4) or bfloat16 (width
  // 2), any alignment. Precondition: all values are finite and below 2^kGridRangeBits in magnitude.
  virtual void AddFloats(int64_t* acc, const uint8_t* values, int width, size_t n, Sign sign, Stream* stream) = 0;
  // acc[i] = value[i] rounded in this way: the first of several additions, without reading what was there.
  virtual void AssignFloats(int64_t* acc, const uint8_t* values, int width, size_t n, Stream* stream) = 0;
  // Index of the first value that is not finite or whose magnitude, as bits of a float32, is not below `limit_bits`
  // (GridLimitBits); -1 if there is no such value.
  virtual int64_t FindOutOfGrid(const uint8_t* values, int width, size_t n, uint32_t limit_bits, Stream* stream) = 0;
  // out[i] = float32(acc[i]) * 2^-kGridBits / contributors, each operation rounded to nearest even.
  virtual void GridToMean(const int64_t* acc, size_t n, uint32_t contributors, float* out, Stream* stream) = 0;
  // out[i] = what GridToMean gives for a sum of values[i] alone, in host memory. `values` and precondition: as of
  // AddFloats.
  virtual void FloatsToMean(const uint8_t* values, int width, size_t n, uint32_t contributors, float* out);

  // Fixed point ---------------------------------------------------------------------------------------------------
  // q[i] = clamp(round_to_even(x[i] / 2^exponent), -limit, limit); x[i] -= q[i] * 2^exponent. The subtraction is exact:
  // a value for which it would not be gives q = 0. Writes each q[i] as `width` little-endian bytes.
  virtual void Quantize(float* x, size_t n, int exponent, int32_t limit, int width, uint8_t* q, Stream* stream) = 0;
  // x[i] += q[i] * 2^exponent.
  virtual void Dequantize(const uint8_t* q, int width, size_t n, int exponent, float* x, Stream* stream) = 0;
  // bf16: out[i] = round_to_even(x[i]), clamped to the magnitude `largest`, a finite bf16; x[i] -= out[i].
  virtual void SplitBf16(float* x, size_t n, float largest, uint8_t* out, Stream* stream) = 0;
  // x[i] += bf16 value[i], any alignment.
  virtual void AddBf16(const uint8_t* values, size_t n, float* x, Stream* stream) = 0;
  // Smallest e with |x[i]| <= 2^e for all i, clamped to [kMinRange, kMaxRange]; kMinRange if all are 0.
  virtual int RangeOf(const float* x, size_t n, Stream* stream) = 0;

  // Selection -----------------------------------------------------------------------------------------------------
  // Index of the first element that is not finite; -1 if all are finite.
  virtual int64_t FindNonFinite(const float* x, size_t n, Stream* stream) = 0;
  // x[i] += y[i].
  virtual void Add(float* x, const float* y, size_t n, Stream* stream) = 0;
  // x[i] += Precondition(gradient[i], &second_moment[i]).
  virtual void AddPreconditioned(float* x, const float* gradient, float* second_moment, size_t n,
                                 const PreconditionCoefficients& c, Stream* stream) = 0;
  // Counts the non-zero elements by the upper kUpperBits of their key: 2^kUpperBits bins, overwritten.
  virtual void UpperHistogram(const float* x, size_t n, uint64_t* bins, Stream* stream) = 0;
  // Of the non-zero elements whose key has these upper bits, counts by the lower kLowerBits: 2^kLowerBits bins.
  virtual void LowerHistogram(const float* x, size_t n, uint32_t upper, uint64_t* bins, Stream* stream) = 0;
  // The threshold above which `wanted` of the elements lie: `key` is the largest key such that at least `wanted`
  // non-zero elements have this key or a larger one, keep_below the share of the elements with this very key that is
  // still missing. Everything that is not zero is taken where no more than `wanted` elements are not zero; nothing is
  // taken where `wanted` is not above 0. By `accuracy` the threshold is that of all elements or of a sample (SampleOf,
  // math/select.h); it is exact for these, so every backend finds the same threshold. The default implementation takes
  // the two histograms.
  virtual Threshold FindThreshold(const float* x, size_t n, double wanted, Accuracy accuracy, Stream* stream);
  // words[i / 64] has at bit i % 64 whether the magnitude of x[i], as bits of a float32, is at least `least`; bits from
  // n on are 0. In host memory.
  virtual void MarkAtLeast(const float* x, size_t n, uint32_t least, uint64_t* words);
  // Takes the selected elements (IsSelected) out of x as integers (QuantizeOne): where the integer is not 0, appends
  // first_position + i and the integer to `positions` and `integers` (room for n each) and leaves the rest in x[i].
  // Positions ascend. Returns how many were taken.
  virtual size_t TakeSelected(float* x, size_t n, const SelectArgs& args, uint32_t first_position, uint32_t* positions,
                              int32_t* integers, Stream* stream) = 0;

  // Sketch --------------------------------------------------------------------------------------------------------
  // Adds integers[i] to the three cells of positions[i], in Z/2^(8 * cell_bytes).
  virtual void SketchAdd(const uint32_t* positions, const int32_t* integers, size_t n, const SketchArgs& args,
                         uint8_t* cells, Stream* stream) = 0;
  // acc[i] += sign * cells[i] in Z/2^(8 * width); `cells` of any alignment.
  virtual void AddCells(uint8_t* acc, const uint8_t* cells, int width, size_t n, Sign sign, Stream* stream) = 0;
  // Recovers the integer at each of `positions` (unique) from the cells, exactly, by peeling.
  // sums[i] is set where resolved[i] becomes 1; elements that peeling cannot resolve (the 2-core) get resolved[i] = 0
  // and sums[i] = 0. The result does not depend on the order of peeling. Cells that are no sum of sketches of these
  // positions (a peer may send anything) give some sums; what is resolved depends on the positions alone.
  virtual void SketchPeel(const uint8_t* cells, const SketchArgs& args, const uint32_t* positions, size_t n,
                          int32_t* sums, uint8_t* resolved, Stream* stream) = 0;

  // Optimizer: one step of n elements of one parameter group (math/optimizer.h) ----------------------------------
  // `momentum` may be null where c.momentum is 0.
  virtual void Sgd(float* p, const float* g, float* momentum, size_t n, const SgdCoefficients& c, Stream* stream) = 0;
  virtual void AdamW(float* p, const float* g, float* m, float* v, size_t n, const AdamWCoefficients& c,
                     Stream* stream) = 0;
  // p[i] -= learning_rate * (mean[i] + weight_decay * p[i]).
  virtual void PlainStep(float* p, const float* mean, size_t n, float learning_rate, float weight_decay,
                         Stream* stream) = 0;
  // p[positions[i] - first_position] -= learning_rate * mean of integers[i] (MeanOfInteger). Positions are unique.
  virtual void SparsePlainStep(float* p, const uint32_t* positions, const int32_t* integers, size_t n,
                               uint32_t first_position, int exponent, uint32_t contributors, float learning_rate,
                               Stream* stream) = 0;

  virtual void Synchronize(Stream* stream) = 0;
};

inline constexpr int kMinRange = -40;
inline constexpr int kMaxRange = 23;

// `name`: auto, cpu, cpu:TARGET, reference or cuda (kernels/README.md). Errors: InvalidArgument for another name;
// FailedPrecondition where this machine or build cannot run that backend, saying why.
absl::StatusOr<std::unique_ptr<Backend>> MakeBackend(std::string_view name);

}  // namespace gradwire::kernels

// Sums of float32 values on the fixed grid of 2^-kGridBits: exact, whatever the order, and what was added can be taken
// out. What codecs merge into whose frames say floats.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "common/base/large_array.h"
#include "common/codec/bits/index_code.h"
#include "common/codec/codec.h"
#include "common/codec/grid/grid_limit.h"

namespace gradwire {

// What values that were checked add to sums, modulo 2^64, as the backend's sums are.
void GridValues(const float* values, size_t n, kernels::Sign sign, uint64_t* out);

// OutOfGrid (grid_limit.h) for the first of values[0 .. n) that is not finite or too large for a sum of all workers;
// `position_of(i)` is that of values[i].
template <typename PositionOf>
absl::Status CheckOnGrid(const CodecContext& context, uint32_t limit_bits, const float* values, size_t n,
                         PositionOf position_of) {
  const int64_t bad =
      context.backend->FindOutOfGrid(reinterpret_cast<const uint8_t*>(values), sizeof(float), n, limit_bits, nullptr);
  if (bad < 0) return absl::OkStatus();
  return OutOfGrid(*context.job, *context.layout, position_of(static_cast<size_t>(bad)), values[bad]);
}

// Not thread-safe.
class GridSums {
 public:
  // `context` outlives the sums.
  explicit GridSums(const CodecContext& context)
      : context_(context), limit_bits_(GridLimitBits(*context.job)), sums_(context.layout->elements) {}

  static size_t Bytes(const BucketLayout& layout) { return layout.elements * sizeof(int64_t); }

  // CheckOnGrid for these sums.
  template <typename PositionOf>
  absl::Status Check(const float* values, size_t n, PositionOf position_of) const {
    return CheckOnGrid(context_, limit_bits_, values, n, position_of);
  }

  // All of these: values have passed Check, positions lie in the bucket.
  void Add(uint64_t begin, const float* values, size_t n, kernels::Sign sign);
  void Add(std::span<const uint32_t> positions, const float* values, kernels::Sign sign);
  // For who decodes positions that will be added.
  LookAhead ahead() const { return {sums_.data(), sizeof(int64_t)}; }
  void Clear() { std::fill(sums_.begin(), sums_.end(), 0); }
  void Clear(std::span<const uint32_t> positions);

  // out[i] = the mean of what was added at begin + i.
  void Means(uint64_t begin, size_t n, uint32_t contributors, float* out) const;
  // Those of elements far apart, whose sums are 0 then: for the last look at them, while they are at hand.
  void TakeMeans(std::span<const uint32_t> positions, uint32_t contributors, float* out);

 private:
  const CodecContext context_;
  const uint32_t limit_bits_;
  LargeArray<int64_t> sums_;
};

}  // namespace gradwire

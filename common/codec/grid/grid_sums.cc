// See grid_sums.h.
#include "common/codec/grid/grid_sums.h"

#include <algorithm>
#include <utility>

#include "kernels/cpu/reference/clones.h"
#include "kernels/math/grid.h"

namespace gradwire {
namespace {

constexpr size_t kAhead = 24;  // sums are long, and what is listed of them lies far apart: fetched so far ahead
constexpr size_t kBatch = 256;

}  // namespace

// A plain loop, which the compiler vectorises.
GW_CLONES void GridValues(const float* values, size_t n, kernels::Sign sign, uint64_t* out) {
  const uint64_t negate = sign == kernels::Sign::kAdd ? 0 : ~uint64_t{0};
  for (size_t i = 0; i < n; ++i) out[i] = (kernels::ToGrid(values[i]) ^ negate) - negate;
}

void GridSums::Add(uint64_t begin, const float* values, size_t n, kernels::Sign sign) {
  context_.backend->AddFloats(sums_.data() + begin, reinterpret_cast<const uint8_t*>(values), sizeof(float), n, sign,
                              nullptr);
}

void GridSums::Add(std::span<const uint32_t> positions, const float* values, kernels::Sign sign) {
  uint64_t grid[kBatch];
  for (size_t begin = 0; begin < positions.size(); begin += kBatch) {
    const size_t end = std::min(positions.size(), begin + kBatch);
    GridValues(values + begin, end - begin, sign, grid);
    for (size_t i = begin; i < end; ++i) {
      if (i + kAhead < positions.size()) __builtin_prefetch(&sums_[positions[i + kAhead]], 1);
      int64_t& sum = sums_[positions[i]];
      sum = static_cast<int64_t>(static_cast<uint64_t>(sum) + grid[i - begin]);
    }
  }
}

void GridSums::Clear(std::span<const uint32_t> positions) {
  for (size_t i = 0; i < positions.size(); ++i) {
    if (i + kAhead < positions.size()) __builtin_prefetch(&sums_[positions[i + kAhead]], 1);
    sums_[positions[i]] = 0;
  }
}

void GridSums::Means(uint64_t begin, size_t n, uint32_t contributors, float* out) const {
  context_.backend->GridToMean(sums_.data() + begin, n, contributors, out, nullptr);
}

void GridSums::TakeMeans(std::span<const uint32_t> positions, uint32_t contributors, float* out) {
  const float unit = kernels::PowerOfTwo(-kernels::kGridBits);
  for (size_t i = 0; i < positions.size(); ++i) {
    if (i + kAhead < positions.size()) __builtin_prefetch(&sums_[positions[i + kAhead]], 1);
    out[i] = kernels::GridMean(std::exchange(sums_[positions[i]], 0), unit, static_cast<float>(contributors));
  }
}

}  // namespace gradwire

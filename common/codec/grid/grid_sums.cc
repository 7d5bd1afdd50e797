// See grid_sums.h.
#include "common/codec/grid/grid_sums.h"

#include "kernels/math/grid.h"

namespace gradwire {
namespace {

constexpr size_t kAhead = 24;  // sums are long, and what is listed of them lies far apart: fetched so far ahead

}  // namespace

void GridSums::Add(uint64_t begin, const float* values, size_t n, kernels::Sign sign) {
  context_.backend->AddFloats(sums_.data() + begin, reinterpret_cast<const uint8_t*>(values), sizeof(float), n, sign,
                              nullptr);
}

void GridSums::Add(std::span<const uint32_t> positions, const float* values, kernels::Sign sign) {
  for (size_t i = 0; i < positions.size(); ++i) {
    if (i + kAhead < positions.size()) __builtin_prefetch(&sums_[positions[i + kAhead]], 1);
    // Modulo 2^64, as the backend's sums.
    const uint64_t grid = kernels::ToGrid(values[i]);
    const uint64_t sum = static_cast<uint64_t>(sums_[positions[i]]);
    sums_[positions[i]] = static_cast<int64_t>(sign == kernels::Sign::kAdd ? sum + grid : sum - grid);
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

void GridSums::Means(std::span<const uint32_t> positions, uint32_t contributors, float* out) const {
  const float unit = kernels::PowerOfTwo(-kernels::kGridBits);
  for (size_t i = 0; i < positions.size(); ++i) {
    if (i + kAhead < positions.size()) __builtin_prefetch(&sums_[positions[i + kAhead]]);
    out[i] = kernels::GridMean(sums_[positions[i]], unit, static_cast<float>(contributors));
  }
}

}  // namespace gradwire

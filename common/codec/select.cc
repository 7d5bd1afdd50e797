// Per-tensor work of a worker: see select.h.
#include "common/codec/select.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/math/select.h"

namespace gradwire {
namespace {

constexpr uint64_t kAll = uint64_t{1} << 32;

Selection SelectNothing() { return {.key = (1u << kernels::kKeyBits) - 1, .keep_below = 0}; }

// Walks down from the highest bin until `*wanted` elements lie above; returns the bin that reaches it and lowers
// `*wanted` by what lies above that bin. Precondition: the bins hold at least `*wanted` elements, and *wanted > 0.
uint32_t BinThatReaches(std::span<const uint64_t> bins, double* wanted) {
  uint32_t bin = static_cast<uint32_t>(bins.size()) - 1;
  while (bin > 0 && static_cast<double>(bins[bin]) < *wanted) *wanted -= static_cast<double>(bins[bin--]);
  return bin;
}

}  // namespace

int64_t FindNonFinite(std::span<const float> values, kernels::Backend& backend) {
  return backend.FindNonFinite(values.data(), values.size(), nullptr);
}

void AddToPending(std::span<const float> gradient, std::span<float> pending, kernels::Backend& backend) {
  backend.Add(pending.data(), gradient.data(), pending.size(), nullptr);
}

void AddStepToPending(std::span<const float> gradient, std::span<float> second_moment, std::span<float> pending,
                      float beta2, float epsilon, uint64_t t, kernels::Backend& backend) {
  backend.AddPreconditioned(pending.data(), gradient.data(), second_moment.data(), pending.size(),
                            kernels::MakePrecondition(beta2, epsilon, t), nullptr);
}

// Two passes over the data: a histogram of the upper bits of the keys finds the bin of the threshold, a histogram of
// the lower bits within that bin finds the key. No sort, and no synchronisation beyond the two results.
Selection SelectThreshold(std::span<const float> pending, double density, kernels::Backend& backend) {
  double wanted = density * static_cast<double>(pending.size());
  if (!(wanted > 0)) return SelectNothing();
  std::vector<uint64_t> upper(size_t{1} << kernels::kUpperBits);
  backend.UpperHistogram(pending.data(), pending.size(), upper.data(), nullptr);
  uint64_t present = 0;
  for (uint64_t n : upper) present += n;
  if (present == 0) return SelectNothing();
  if (static_cast<double>(present) <= wanted) return {.key = 0, .keep_below = kAll};
  const uint32_t upper_bin = BinThatReaches(upper, &wanted);
  std::vector<uint64_t> lower(size_t{1} << kernels::kLowerBits);
  backend.LowerHistogram(pending.data(), pending.size(), upper_bin, lower.data(), nullptr);
  const uint32_t lower_bin = BinThatReaches(lower, &wanted);
  const double share = std::min(1.0, wanted / static_cast<double>(lower[lower_bin]));
  return {.key = (upper_bin << kernels::kLowerBits) | lower_bin,
          .keep_below = static_cast<uint64_t>(share * static_cast<double>(kAll))};
}

}  // namespace gradwire

// Choice of the backend, and what all backends share.
#include "kernels/backend.h"

#include <algorithm>
#include <span>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "kernels/cpu/reference/loops.h"
#include "kernels/cpu/reference/reference_backend.h"
#include "kernels/cpu/simd/simd_backend.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/math/select.h"

namespace gradwire::kernels {
namespace {

constexpr Threshold kNothing = {.key = (1u << kKeyBits) - 1, .keep_below = 0};
constexpr Threshold kEverything = {.key = 0, .keep_below = uint64_t{1} << 32};

// Walks down from the highest bin until `*wanted` elements lie above; returns the bin that reaches it and lowers
// `*wanted` by what lies above that bin (exactly: counts are integers). Precondition: the bins hold at least `*wanted`
// elements, and *wanted > 0.
uint32_t BinThatReaches(std::span<const uint64_t> bins, double* wanted) {
  uint32_t bin = static_cast<uint32_t>(bins.size()) - 1;
  while (bin > 0 && static_cast<double>(bins[bin]) < *wanted) *wanted -= static_cast<double>(bins[bin--]);
  return bin;
}

}  // namespace

bool Backend::AssignWords(int32_t* acc, const uint8_t* values, size_t n, const WordRange& range) {
  return reference::AssignWords(acc, values, n, range);
}

void Backend::FloatsToMean(const uint8_t* values, int width, size_t n, uint32_t contributors, float* out) {
  reference::FloatsToMean(values, width, n, contributors, out);
}

void Backend::MarkAtLeast(const float* x, size_t n, uint32_t least, uint64_t* words) {
  reference::MarkAtLeast(x, n, least, words);
}

// A histogram of the upper bits of the keys finds the bin of the threshold, one of the lower bits within that bin the
// key.
Threshold Backend::FindThreshold(const float* x, size_t n, double wanted, Accuracy accuracy, Stream* stream) {
  if (!(wanted > 0)) return kNothing;
  const LineSample sample = SampleOf(n, wanted, accuracy);
  std::vector<float> gathered;
  if (sample.stride > 1) {
    gathered.reserve(sample.size);
    for (uint64_t line = 0; line < sample.size / kSampleLine; ++line) {
      const float* const begin = x + sample.LineAt(line) * kSampleLine;
      gathered.insert(gathered.end(), begin, begin + kSampleLine);
    }
    x = gathered.data();
    n = gathered.size();
    wanted = sample.wanted;
  }
  std::vector<uint64_t> upper(size_t{1} << kUpperBits);
  UpperHistogram(x, n, upper.data(), stream);
  uint64_t present = 0;
  for (uint64_t count : upper) present += count;
  if (static_cast<double>(present) <= wanted) return kEverything;
  const uint32_t upper_bin = BinThatReaches(upper, &wanted);
  std::vector<uint64_t> lower(size_t{1} << kLowerBits);
  LowerHistogram(x, n, upper_bin, lower.data(), stream);
  const uint32_t lower_bin = BinThatReaches(lower, &wanted);
  return {.key = (upper_bin << kLowerBits) | lower_bin, .keep_below = ShareOfTies(wanted, lower[lower_bin])};
}

absl::StatusOr<std::unique_ptr<Backend>> MakeBackend(std::string_view name) {
  const std::vector<std::string> targets = SimdTargets();
  if (name == "reference") return MakeReferenceBackend();
  if (name == "auto" || name == "cpu") {
    return targets.empty() ? MakeReferenceBackend() : MakeSimdBackend(targets.front());
  }
  if (name == "cuda") return MakeCudaBackend();
  if (name.starts_with("cpu:")) {
    name.remove_prefix(4);
    if (auto backend = MakeSimdBackend(name)) return backend;
    return absl::FailedPreconditionError(
        absl::StrFormat("this machine or build has no SIMD target '%s'; it has: %s. 'cpu' takes the best one",
                        std::string(name), targets.empty() ? "none" : absl::StrJoin(targets, ", ")));
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("unknown backend '%s'; known: auto, cpu, cpu:TARGET, reference, cuda", std::string(name)));
}

}  // namespace gradwire::kernels

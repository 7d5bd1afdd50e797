// See grid_limit.h.
#include "common/codec/grid/grid_limit.h"

#include <bit>
#include <limits>
#include <string>

#include "absl/strings/str_format.h"
#include "common/codec/frame/run_pieces.h"
#include "common/job/round_mode.h"
#include "kernels/math/grid.h"

namespace gradwire {

uint32_t MostFramesOfSum(const Job& job) { return IsAsync(job) ? 1 : job.spec().max_workers(); }

uint32_t GridLimitBits(const Job& job) { return kernels::GridLimitBits(MostFramesOfSum(job)); }

SentLimit SentLimitOf(const CodecContext& context, int digits) {
  const uint32_t limit = GridLimitBits(*context.job);
  const auto largest = [limit](int with) {
    const uint32_t cleared = (1u << (kAllDigits - with)) - 1;
    return (limit - 1) & ~cleared;
  };
  if (context.update) return {.from = std::numeric_limits<float>::infinity(), .to = kernels::kLargestBf16};
  if (digits == kAllDigits)
    return {.from = std::bit_cast<float>(limit), .to = std::bit_cast<float>(largest(kBf16Digits))};
  return {.from = std::bit_cast<float>(largest(digits) + 1), .to = std::bit_cast<float>(largest(digits))};
}

float GridLimit(const Job& job) { return std::bit_cast<float>(GridLimitBits(job)); }

absl::Status OutOfGrid(const Job& job, uint32_t tensor, const std::string& what, float value) {
  return absl::InvalidArgumentError(absl::StrFormat(
      "tensor '%s', %s: value %g is not finite or its magnitude is not below %.9g, which keeps sums of %d workers "
      "exact; the contribution is refused. Look at the loss and the learning rate, scale what is pushed, lower "
      "max_workers, or give the tensor a codec that adds integers (dense:fixed32)",
      job.tensors()[tensor].name, what, value, GridLimit(job), MostFramesOfSum(job)));
}

absl::Status OutOfGrid(const Job& job, const BucketLayout& layout, uint64_t position, float value) {
  const size_t run = RunOf(layout, position);
  const Run& r = layout.runs[run];
  return OutOfGrid(job, r.tensor, absl::StrFormat("element %d", r.offset + position - layout.run_begin[run]), value);
}

}  // namespace gradwire

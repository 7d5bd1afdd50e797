// See grid_limit.h.
#include "common/codec/grid/grid_limit.h"

#include <bit>
#include <string>

#include "absl/strings/str_format.h"
#include "common/codec/frame/run_pieces.h"
#include "common/job/round_mode.h"
#include "kernels/math/grid.h"

namespace gradwire {

uint32_t MostFramesOfSum(const Job& job) { return IsAsync(job) ? 1 : job.spec().max_workers(); }

uint32_t GridLimitBits(const Job& job) { return kernels::GridLimitBits(MostFramesOfSum(job)); }

float LargestSent(const CodecContext& context) {
  if (context.update) return kernels::kLargestBf16;
  return std::bit_cast<float>((GridLimitBits(*context.job) - 1) & 0xFFFF0000u);
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

// What float32 values that frames carry have to stay below, so that their sums on the grid never leave 64 bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "common/codec/codec.h"
#include "common/job/job.h"
#include "common/job/layout.h"

namespace gradwire {

// How many frames a sum may have: one of every worker; with asynchronous rounds, whose frames are merged alone, one.
uint32_t MostFramesOfSum(const Job& job);
// The bits of that magnitude as a float32 (kernels::GridLimitBits), and the magnitude: 2^18, from 3 workers on
// 2^19 / max_workers.
uint32_t GridLimitBits(const Job& job);
float GridLimit(const Job& job);

// The largest magnitude that an encoder sends while something keeps what is beyond: the largest bfloat16 below the
// limit, which every format holds. With so few digits what is left is exact, and a scale's rounding stays below the
// limit. Update frames are added to nothing: the largest bfloat16 of all.
float LargestSent(const CodecContext& context);
// Clamped to it; what is not finite stays, for others to refuse.
inline float Within(float x, float largest) {
  return std::fabs(x) > largest && std::isfinite(x) ? std::copysign(largest, x) : x;
}

// InvalidArgument for a value that is not finite or reaches the limit, naming tensor, element, limit and what to do.
absl::Status OutOfGrid(const Job& job, const BucketLayout& layout, uint64_t position, float value);
// The same for other numbers that stand for a tensor: `what` is one of its "element 3".
absl::Status OutOfGrid(const Job& job, uint32_t tensor, const std::string& what, float value);

}  // namespace gradwire

// What float32 values that frames carry have to stay below, so that their sums on the grid never leave 64 bits.
#pragma once

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

// What an encoder sends while something keeps what is beyond. Values below the limit go as they are where the format
// has them all; where it has the first `digits` binary digits, or rounds, up to the largest such number below the
// limit. What is cut is cut to few digits, so that what is left is exact. Update frames are added to nothing: all there
// is.
inline constexpr int kAllDigits = 24;
inline constexpr int kBf16Digits = 8;
inline constexpr int kFp16Digits = 11;
SentLimit SentLimitOf(const CodecContext& context, int digits);

// InvalidArgument for a value that is not finite or reaches the limit, naming tensor, element, limit and what to do.
absl::Status OutOfGrid(const Job& job, const BucketLayout& layout, uint64_t position, float value);
// The same for other numbers that stand for a tensor: `what` is one of its "element 3".
absl::Status OutOfGrid(const Job& job, uint32_t tensor, const std::string& what, float value);

}  // namespace gradwire

// The shape of frames that are learning rates and then blocks of one type.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "common/job/layout.h"
#include "common/wire/frame.h"

namespace gradwire {

// As Codec::CheckComplete, for such frames: the blocks cover [0, count) once, in order.
inline absl::Status CheckBlocks(const BucketLayout& layout, uint64_t round, wire::SegmentType type, uint64_t count,
                                std::span<const wire::SegmentHeader> segments) {
  bool good = !segments.empty() && segments[0].type == wire::SegmentType::kLearningRates && segments[0].begin == 0;
  uint64_t covered = 0;
  for (size_t i = 1; good && i < segments.size(); ++i) {
    const wire::SegmentHeader& s = segments[i];
    good = s.type == type && s.begin == covered && s.count != 0;
    if (good) covered += s.count;
  }
  if (good && covered == count) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "frame of bucket %d on shard %d: round %d wants learning rates and then segments of type %d; these "
      "are in order for %d of %d values",
      layout.bucket, layout.shard, round, static_cast<int>(type), covered, count));
}

// The same for all elements, none in round 0.
inline absl::Status CheckCoverage(const BucketLayout& layout, uint64_t round, wire::SegmentType type,
                                  std::span<const wire::SegmentHeader> segments) {
  return CheckBlocks(layout, round, type, round == 0 ? 0 : layout.elements, segments);
}

}  // namespace gradwire

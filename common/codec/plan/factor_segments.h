// Factors of plans (RoundPlan::factors) on the wire: kFactors segments.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "common/wire/frame.h"

namespace gradwire {

void AddFactors(std::span<const float> values, wire::FrameWriter* writer);

// A segment of `size` factor values. InvalidArgument.
absl::Status CheckFactors(const wire::Segment& segment, uint64_t size);

// Appends the values of a segment to `factors`, of which `size` are expected. InvalidArgument.
absl::Status ReadFactors(const wire::Segment& segment, uint64_t size, std::vector<float>* factors);

}  // namespace gradwire

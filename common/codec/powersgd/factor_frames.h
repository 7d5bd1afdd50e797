// Factors on the wire (kFactors segments), and what an update frame of them stands for.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "common/codec/powersgd/matrices.h"
#include "common/codec/update/update.h"
#include "common/wire/frame.h"

namespace gradwire::powersgd {

void AddFactors(std::span<const float> values, wire::FrameWriter* writer);

// A segment of `size` factor values. InvalidArgument.
absl::Status CheckFactors(const wire::Segment& segment, uint64_t size);

// Appends the values of a segment to `factors`, of which `size` are expected. InvalidArgument.
absl::Status ReadFactors(const wire::Segment& segment, uint64_t size, std::vector<float>* factors);

// Ends the reading of an update frame whose factors lie in update->next: in a round that sums Q it stands for the means
// P Q^T, `p` from the plan of the round. Nobody contributed: the factors are 0, so that others are drawn. Errors:
// InvalidArgument (not all factors came), FailedPrecondition (`p` is not that of the round).
absl::Status FinishUpdate(std::span<const Matrix> matrices, std::span<const float> p, const BucketLayout& slice,
                          Update* update);

}  // namespace gradwire::powersgd

// What an update frame of factors stands for.
#pragma once

#include <span>

#include "absl/status/status.h"
#include "common/codec/powersgd/matrices.h"
#include "common/codec/update/update.h"

namespace gradwire::powersgd {

// Ends the reading of an update frame whose factors lie in update->next: in a round that sums Q it stands for the means
// P Q^T, `p` from the plan of the round. Nobody contributed: the factors are 0, so that others are drawn. Errors:
// InvalidArgument (not all factors came), FailedPrecondition (`p` is not that of the round).
absl::Status FinishUpdate(std::span<const Matrix> matrices, std::span<const float> p, const BucketLayout& slice,
                          Update* update);

}  // namespace gradwire::powersgd

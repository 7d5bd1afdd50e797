// Whether a plan that came in a frame is one that a shard of this job would publish.
#pragma once

#include "absl/status/status.h"
#include "common/codec/codec.h"

namespace gradwire {

// A plan of the bucket `layout`. Exponents are kUncalibrated or within [kMinExponent, kMaxExponent], one per run where
// the bucket's codec has exponents, else none; a sketch geometry is none, or one that the bucket's codec allows;
// factors are those of the bucket's matrices at `version`, magnitudes below 2^18. InvalidArgument names bucket, found
// and allowed.
absl::Status CheckPlan(const Job& job, const BucketLayout& layout, uint64_t version, const RoundPlan& plan);

}  // namespace gradwire

// What becomes of the plans of a bucket when its job moves to another number of shards.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/codec/codec.h"

namespace gradwire {

// The part of a bucket on one shard, with its plan; of the plan only the geometry of the sketch is looked at.
struct PlanPart {
  const BucketLayout* layout = nullptr;
  RoundPlan plan;
};

// The plan of the part `to` of a bucket whose parts on all other-numbered shards were `from`. `exponents`: of the runs
// of `to`, which a run keeps wherever it lies. A sketch gets as many cells per element as those had together; where one
// of them had no sketch (its bucket was still being calibrated), this one has none. The sketch decides which elements
// may be deferred, nothing else: sums do not depend on it.
RoundPlan ReshardPlan(const Job& job, const BucketLayout& to, std::vector<int8_t> exponents,
                      std::span<const PlanPart> from);

}  // namespace gradwire

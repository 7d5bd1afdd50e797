// See plan_reshard.h.
#include "common/codec/plan/plan_reshard.h"

#include <utility>

#include "common/codec/family.h"

namespace gradwire {

RoundPlan ReshardPlan(const Job& job, const BucketLayout& to, std::vector<int8_t> exponents,
                      std::span<const PlanPart> from) {
  RoundPlan plan;
  plan.exponents = std::move(exponents);
  FamilyOf(job, to).ReshardSketch(job, to, from, &plan);
  return plan;
}

}  // namespace gradwire

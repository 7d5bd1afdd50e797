// See plan_reshard.h.
#include "common/codec/plan/plan_reshard.h"

#include <utility>

#include "common/codec/tagc/geometry.h"

namespace gradwire {

RoundPlan ReshardPlan(const Job& job, const BucketLayout& to, std::vector<int8_t> exponents,
                      std::span<const PlanPart> from) {
  RoundPlan plan;
  plan.exponents = std::move(exponents);
  const auto* spec = std::get_if<TagcSpec>(&job.codecs()[to.codec]);
  if (spec == nullptr || to.elements == 0) return plan;
  double capacity = 0;
  double elements = 0;
  for (const PlanPart& part : from) {
    if (part.layout->elements == 0) continue;
    if (part.plan.sketch_groups == 0) return plan;
    capacity += tagc::CapacityOf({part.plan.sketch_groups, part.plan.cells_per_group}, spec->slack);
    elements += static_cast<double>(part.layout->elements);
  }
  const tagc::Geometry geometry =
      tagc::ShareOfGeometry(capacity, static_cast<double>(to.elements) / elements, spec->slack,
                            tagc::LimitsFor(*spec, to.elements, job.spec().max_workers()));
  plan.sketch_groups = geometry.groups;
  plan.cells_per_group = geometry.cells_per_group;
  return plan;
}

}  // namespace gradwire

// See plan_check.h.
#include "common/codec/plan_check.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "common/codec/tagc/geometry.h"
#include "kernels/math/fixed_point.h"

namespace gradwire {

absl::Status CheckPlan(const Job& job, const BucketLayout& layout, const RoundPlan& plan) {
  if (!plan.exponents.empty() && plan.exponents.size() != layout.runs.size()) {
    return absl::InvalidArgumentError(absl::StrFormat("plan of bucket %d has exponents of %d runs; the bucket has %d",
                                                      layout.bucket, plan.exponents.size(), layout.runs.size()));
  }
  for (size_t run = 0; run < plan.exponents.size(); ++run) {
    const int exponent = plan.exponents[run];
    if (exponent == kUncalibrated) continue;
    if (exponent >= kernels::kMinExponent && exponent <= kernels::kMaxExponent) continue;
    return absl::InvalidArgumentError(absl::StrFormat("plan of bucket %d: exponent %d of run %d is outside [%d, %d]",
                                                      layout.bucket, exponent, run, kernels::kMinExponent,
                                                      kernels::kMaxExponent));
  }
  if (plan.sketch_groups == 0 && plan.cells_per_group == 0) return absl::OkStatus();
  const auto* spec = std::get_if<TagcSpec>(&job.codecs()[layout.codec]);
  absl::Status status = absl::InvalidArgumentError("its codec has no sketch");
  if (spec != nullptr) {
    const double density = spec->warmup_rounds != 0 ? std::max(spec->density, spec->warmup_density) : spec->density;
    status = tagc::CheckGeometry({plan.sketch_groups, plan.cells_per_group},
                                 tagc::LimitsFor(layout.elements, density, job.spec().max_workers(), spec->slack));
  }
  if (status.ok()) return status;
  return absl::InvalidArgumentError(absl::StrFormat("plan of bucket %d with %d groups of %d cells: %s", layout.bucket,
                                                    plan.sketch_groups, plan.cells_per_group,
                                                    std::string(status.message())));
}

}  // namespace gradwire

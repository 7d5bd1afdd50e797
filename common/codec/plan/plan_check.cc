// See plan_check.h.
#include "common/codec/plan/plan_check.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "common/codec/family.h"
#include "kernels/math/grid.h"

namespace gradwire {
namespace {

absl::Status CheckExponents(const CodecSpec& codec, const BucketLayout& layout, const RoundPlan& plan) {
  const size_t expected = FamilyOf(codec).PlansExponents(codec) ? layout.runs.size() : 0;
  if (plan.exponents.size() != expected) {
    return absl::InvalidArgumentError(absl::StrFormat("plan of bucket %d has exponents of %d runs; %s needs %d",
                                                      layout.bucket, plan.exponents.size(), ToString(codec), expected));
  }
  for (size_t run = 0; run < plan.exponents.size(); ++run) {
    const int exponent = plan.exponents[run];
    if (exponent == kUncalibrated) continue;
    if (exponent >= kernels::kMinExponent && exponent <= kernels::kMaxExponent) continue;
    return absl::InvalidArgumentError(absl::StrFormat("plan of bucket %d: exponent %d of run %d is outside [%d, %d]",
                                                      layout.bucket, exponent, run, kernels::kMinExponent,
                                                      kernels::kMaxExponent));
  }
  return absl::OkStatus();
}

absl::Status CheckFactors(uint64_t expected, const BucketLayout& layout, uint64_t version, const RoundPlan& plan) {
  if (plan.factors.size() != expected) {
    return absl::InvalidArgumentError(
        absl::StrFormat("plan of bucket %d at version %d has %d factor values, expected %d", layout.bucket, version,
                        plan.factors.size(), expected));
  }
  const auto bad = std::find_if(plan.factors.begin(), plan.factors.end(), [](float x) {
    return !(std::fabs(x) < static_cast<float>(1 << kernels::kGridRangeBits));  // NaN is bad, too
  });
  if (bad == plan.factors.end()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("plan of bucket %d: factor value %d is %g; its magnitude must be below "
                      "%d",
                      layout.bucket, bad - plan.factors.begin(), *bad, 1 << kernels::kGridRangeBits));
}

}  // namespace

absl::Status CheckPlan(const Job& job, const BucketLayout& layout, uint64_t version, const RoundPlan& plan) {
  const CodecSpec& codec = job.codecs()[layout.codec];
  const CodecFamily& family = FamilyOf(codec);
  if (absl::Status status = CheckExponents(codec, layout, plan); !status.ok()) return status;
  absl::Status factors = CheckFactors(family.FactorsAt(job, layout, version), layout, version, plan);
  if (!factors.ok()) return factors;
  if (plan.sketch_groups == 0 && plan.cells_per_group == 0) return absl::OkStatus();
  const absl::Status sketch = family.CheckSketch(job, layout, plan);
  if (sketch.ok()) return sketch;
  return absl::InvalidArgumentError(absl::StrFormat("plan of bucket %d with %d groups of %d cells: %s", layout.bucket,
                                                    plan.sketch_groups, plan.cells_per_group,
                                                    std::string(sketch.message())));
}

}  // namespace gradwire

// See plan_check.h.
#include "common/codec/plan/plan_check.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "common/codec/powersgd/matrices.h"
#include "common/codec/tagc/geometry.h"
#include "kernels/math/grid.h"

namespace gradwire {
namespace {

absl::Status CheckFactors(const Job& job, const BucketLayout& layout, uint64_t version, const RoundPlan& plan) {
  const uint64_t expected = powersgd::SizeOf(powersgd::MatricesOf(job, layout), powersgd::FactorPlannedAt(version));
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
  const auto* dense = std::get_if<DenseSpec>(&codec);
  const bool scaled = std::holds_alternative<TagcSpec>(codec) || std::holds_alternative<HomomorphicSpec>(codec) ||
                      (dense != nullptr && dense->fixed());
  const size_t exponents = scaled ? layout.runs.size() : 0;
  if (plan.exponents.size() != exponents) {
    return absl::InvalidArgumentError(absl::StrFormat("plan of bucket %d has exponents of %d runs; %s needs %d",
                                                      layout.bucket, plan.exponents.size(), ToString(codec),
                                                      exponents));
  }
  for (size_t run = 0; run < plan.exponents.size(); ++run) {
    const int exponent = plan.exponents[run];
    if (exponent == kUncalibrated) continue;
    if (exponent >= kernels::kMinExponent && exponent <= kernels::kMaxExponent) continue;
    return absl::InvalidArgumentError(absl::StrFormat("plan of bucket %d: exponent %d of run %d is outside [%d, %d]",
                                                      layout.bucket, exponent, run, kernels::kMinExponent,
                                                      kernels::kMaxExponent));
  }
  if (absl::Status status = CheckFactors(job, layout, version, plan); !status.ok()) return status;
  if (plan.sketch_groups == 0 && plan.cells_per_group == 0) return absl::OkStatus();
  const auto* spec = std::get_if<TagcSpec>(&codec);
  absl::Status status = absl::InvalidArgumentError("its codec has no sketch");
  if (spec != nullptr) {
    status = tagc::CheckGeometry({plan.sketch_groups, plan.cells_per_group},
                                 tagc::LimitsFor(*spec, layout.elements, job.spec().max_workers()));
  }
  if (status.ok()) return status;
  return absl::InvalidArgumentError(absl::StrFormat("plan of bucket %d with %d groups of %d cells: %s", layout.bucket,
                                                    plan.sketch_groups, plan.cells_per_group,
                                                    std::string(status.message())));
}

}  // namespace gradwire

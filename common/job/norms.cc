// See norms.h.
#include "common/job/norms.h"

namespace gradwire {

std::vector<std::vector<Norm>> NormPhases(const Job& job) {
  const v1::OptimizerKind kind = job.spec().optimizer().kind();
  std::vector<std::vector<Norm>> phases;
  if (ClipsNorm(job) || kind == v1::OPTIMIZER_LANS) phases.push_back({Norm::kGradient});
  if (kind == v1::OPTIMIZER_LAMB) phases.push_back({Norm::kParameter, Norm::kMoment});
  if (kind == v1::OPTIMIZER_LANS) phases.push_back({Norm::kParameter, Norm::kMoment, Norm::kCandidate});
  if (phases.empty() && SkipsNonFinite(job)) phases.emplace_back();
  return phases;
}

std::vector<Norm> NormsOf(const Job& job) {
  std::vector<Norm> norms;
  for (const std::vector<Norm>& phase : NormPhases(job)) norms.insert(norms.end(), phase.begin(), phase.end());
  return norms;
}

std::vector<uint32_t> TensorsOf(const BucketLayout& slice) {
  std::vector<uint32_t> tensors;
  for (const Run& run : slice.runs) {
    if (tensors.empty() || tensors.back() != run.tensor) tensors.push_back(run.tensor);
  }
  return tensors;
}

}  // namespace gradwire

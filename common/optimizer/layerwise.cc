// See layerwise.h.
#include "common/optimizer/layerwise.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/job/norms.h"
#include "kernels/cpu/layerwise.h"

namespace gradwire {
namespace {

// clip_grad_norm_ adds this to the norm.
constexpr double kClipEpsilon = 1e-6;

// Calls fn(run, tensor) for every run; `tensor` counts those of the slice.
template <typename Fn>
void ForEachRun(const BucketLayout& layout, Fn fn) {
  size_t tensor = 0;
  for (size_t run = 0; run < layout.runs.size(); ++run) {
    if (run > 0 && layout.runs[run].tensor != layout.runs[run - 1].tensor) ++tensor;
    fn(run, tensor);
  }
}

}  // namespace

double ClipScale(const Job& job, const Update& update) {
  if (!update.mean_square) return 1;
  return std::min(1.0, static_cast<double>(job.spec().clip_norm()) / (std::sqrt(*update.mean_square) + kClipEpsilon));
}

kernels::LayerCoefficients LayerOf(const Job& job, const Update& update, const GroupStep& step, size_t tensor) {
  kernels::LayerCoefficients c = step.layer;
  const std::vector<Norm> norms = NormsOf(job);
  double of[4] = {};  // by Norm
  for (size_t i = 0; i < norms.size(); ++i) {
    const size_t at = tensor * norms.size() + i;
    if (at < update.norms.size()) of[static_cast<size_t>(norms[i])] = update.norms[at];
  }
  const auto square = [&of](Norm norm) { return of[static_cast<size_t>(norm)]; };
  const double rate = step.learning_rate;
  const double ratio = kernels::TrustRatio(square(Norm::kParameter), square(Norm::kMoment));
  if (job.spec().optimizer().kind() != v1::OPTIMIZER_LANS) {
    c.direction_rate = static_cast<float>(rate * ratio);
    return c;
  }
  const double beta1 = c.beta1;
  const double candidate = kernels::TrustRatio(square(Norm::kParameter), square(Norm::kCandidate));
  const double clip = ClipScale(job, update);
  const double norm = clip * std::sqrt(square(Norm::kGradient));
  c.gradient_scale = static_cast<float>(clip / (norm + static_cast<double>(c.epsilon)));
  c.direction_rate = static_cast<float>(rate * beta1 * ratio);
  c.gradient_rate = static_cast<float>(rate * (1.0 - beta1) * candidate);
  return c;
}

absl::StatusOr<std::vector<double>> SquaresOfPhase(const Job& job, const BucketLayout& layout, const Update& update,
                                                   std::span<const RunState> runs, size_t phase) {
  const std::vector<Norm> norms = NormPhases(job)[phase];
  std::vector<double> squares(norms.size() * layout.runs.size());
  if (norms.empty() || !Applies(job, update)) return squares;
  GW_RETURN_IF_ERROR(CheckUpdate(job, layout, update, runs.size()));
  const std::vector<GroupStep> steps = DeriveSteps(job, update);
  const float scale = static_cast<float>(ClipScale(job, update));
  const bool prescaled = job.spec().optimizer().kind() != v1::OPTIMIZER_LANS;
  std::vector<float> mean;
  ForEachRun(layout, [&](size_t r, size_t tensor) {
    const Run& run = layout.runs[r];
    const RunState& state = runs[r];
    mean.resize(std::max<size_t>(mean.size(), run.length));
    update.MeanOfRun(layout, static_cast<uint32_t>(r), mean.data());
    kernels::DirectionSums directions;
    if (norms.back() != Norm::kGradient) {
      if (prescaled && scale != 1.0f) kernels::Scale(mean.data(), run.length, scale);
      const GroupStep& step = steps[job.tensors()[run.tensor].group];
      directions = kernels::SumsOfDirections(state.parameter, mean.data(), state.first_moment, state.second_moment,
                                             run.length, LayerOf(job, update, step, tensor));
    }
    for (size_t i = 0; i < norms.size(); ++i) {
      double& square = squares[i * layout.runs.size() + r];
      switch (norms[i]) {
        case Norm::kGradient:
          square = kernels::SumOfSquares(mean.data(), run.length);
          break;
        case Norm::kParameter:
          square = kernels::SumOfSquares(state.parameter, run.length);
          break;
        case Norm::kMoment:
          square = directions.of_moment;
          break;
        case Norm::kCandidate:
          square = directions.of_gradient;
          break;
      }
    }
  });
  return squares;
}

}  // namespace gradwire

// The optimizer step: see optimizer.h. One run at a time: its mean is read where it lies in the frame, or lies in the
// first-level cache when it is applied.
#include "common/optimizer/optimizer.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/frame/run_pieces.h"
#include "common/job/norms.h"
#include "common/job/round_mode.h"
#include "common/optimizer/layerwise.h"
#include "common/optimizer/steps.h"
#include "kernels/cpu/layerwise.h"
#include "kernels/math/fixed_point.h"

namespace gradwire {
namespace {

// A run that was not calibrated when the round began has no scale; all that may have been sent for it is 0.
bool SumsAreZero(const BucketLayout& layout, const Update& update, size_t run) {
  const uint64_t begin = layout.run_begin[run], end = layout.run_begin[run + 1];
  if (update.body == Update::Body::kSparse) {
    const auto first = std::lower_bound(update.positions.begin(), update.positions.end(), begin);
    return first == update.positions.end() || *first >= end;
  }
  if (update.body != Update::Body::kDenseInt) return true;
  std::vector<int32_t> sums(end - begin);
  update.CopyDense(begin, end - begin, sums.data());
  return std::all_of(sums.begin(), sums.end(), [](int32_t sum) { return sum == 0; });
}

absl::Status CheckMemory(const Job& job, const BucketLayout& layout, const RunState& run, size_t index) {
  const int moments = job.moments();
  if (run.parameter != nullptr && (moments < 1 || run.first_moment != nullptr) &&
      (moments < 2 || run.second_moment != nullptr)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("bucket %d, run %d of tensor '%s': memory of the parameter or of one of %d moments is missing",
                      layout.bucket, index, job.tensors()[layout.runs[index].tensor].name, moments));
}

// Touches only the elements that were sent.
void ApplySparseSteps(const Job& job, const BucketLayout& layout, const Update& update,
                      std::span<const GroupStep> steps, std::span<const RunState> runs, kernels::Backend& backend) {
  const auto begin = update.positions.begin();
  for (size_t first = 0; first < update.positions.size();) {
    const size_t run = RunOf(layout, update.positions[first]);
    const size_t last = static_cast<size_t>(
        std::lower_bound(begin + static_cast<ptrdiff_t>(first), update.positions.end(), layout.run_begin[run + 1]) -
        begin);
    const GroupStep& step = steps[job.tensors()[layout.runs[run].tensor].group];
    if (update.body == Update::Body::kSparseFloat) {
      for (; first < last; ++first) {
        float& p = runs[run].parameter[update.positions[first] - layout.run_begin[run]];
        p = kernels::PlainStep(p, update.values[first], step.learning_rate);
      }
      continue;
    }
    backend.SparsePlainStep(runs[run].parameter, &update.positions[first], &update.integers[first], last - first,
                            static_cast<uint32_t>(layout.run_begin[run]), update.exponents[run], update.contributors,
                            step.learning_rate, nullptr);
    first = last;
  }
}

// A step of SGD that leaves finite parameters without a gradient alone, to the bit: it has no momentum and no decay,
// and a rate without a sign (else -0 would become 0).
bool IsPlainSgd(const v1::OptimizerSpec& optimizer, std::span<const GroupStep> steps) {
  return optimizer.kind() == v1::OPTIMIZER_SGD && std::ranges::all_of(steps, [](const GroupStep& step) {
           return step.sgd.momentum == 0 && step.sgd.weight_decay == 0 && !std::signbit(step.learning_rate);
         });
}

absl::Status CheckNorms(const Job& job, const BucketLayout& layout, const Update& update) {
  const size_t per_tensor = NormsOf(job).size();
  const size_t expected = per_tensor == 0 ? 0 : per_tensor * TensorsOf(layout).size();
  if (update.norms.size() == expected && update.mean_square.has_value() == ClipsNorm(job)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "update of round %d, bucket %d: %d norms of tensors, expected %d, and %s of the mean of all", update.round,
      layout.bucket, update.norms.size(), expected, update.mean_square.has_value() ? "that" : "none"));
}

absl::Status ReplaceParameters(const Job& job, const BucketLayout& layout, const Update& update,
                               std::span<const RunState> runs) {
  if (!job.keeps_parameters()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "update of round %d, bucket %d replaces parameters; the job keeps none", update.round, layout.bucket));
  }
  for (size_t i = 0; i < runs.size(); ++i) GW_RETURN_IF_ERROR(CheckMemory(job, layout, runs[i], i));
  for (size_t i = 0; i < runs.size(); ++i)
    update.CopyDense(layout.run_begin[i], layout.runs[i].length, runs[i].parameter);
  return absl::OkStatus();
}

}  // namespace

bool Applies(const Job& job, const Update& update) {
  return CarriesValues(job, update.round) && update.contributors != 0 && update.body != Update::Body::kEmpty &&
         job.spec().optimizer().kind() != v1::OPTIMIZER_NONE;
}

std::vector<GroupStep> DeriveSteps(const Job& job, const Update& update) {
  const v1::OptimizerSpec& optimizer = job.spec().optimizer();
  const uint64_t t = StepOf(job, update.round) - update.nonfinite_rounds;
  std::vector<GroupStep> steps;
  for (int i = 0; i < optimizer.groups_size(); ++i) {
    const v1::OptimizerGroup& group = optimizer.groups(i);
    GroupStep step;
    step.learning_rate = update.learning_rates[static_cast<size_t>(i)];
    step.weight_decay = group.weight_decay();
    step.sgd = {step.learning_rate, group.weight_decay(), group.momentum(), group.nesterov()};
    if (optimizer.kind() == v1::OPTIMIZER_ADAMW) {
      step.adamw = kernels::MakeAdamW(step.learning_rate, group.weight_decay(), group.beta1(), group.beta2(),
                                      group.epsilon(), t);
    }
    step.lion = kernels::MakeLion(step.learning_rate, group.weight_decay(), group.beta1(), group.beta2());
    if (optimizer.kind() == v1::OPTIMIZER_LAMB || optimizer.kind() == v1::OPTIMIZER_LANS) {
      step.layer = kernels::MakeLayer(group.weight_decay(), group.beta1(), group.beta2(), group.epsilon(), t);
    }
    steps.push_back(step);
  }
  return steps;
}

absl::Status CheckUpdate(const Job& job, const BucketLayout& layout, const Update& update, size_t runs) {
  const size_t groups = static_cast<size_t>(job.spec().optimizer().groups_size());
  if (update.learning_rates.size() != groups || runs != layout.runs.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("update of round %d, bucket %d: %d learning rates for %d groups, memory for %d runs of %d",
                        update.round, layout.bucket, update.learning_rates.size(), groups, runs, layout.runs.size()));
  }
  if (!update.integers_of_exponents()) return absl::OkStatus();
  if (update.exponents.size() != layout.runs.size()) {
    return absl::InvalidArgumentError(absl::StrFormat("update of round %d, bucket %d: %d exponents for %d runs",
                                                      update.round, layout.bucket, update.exponents.size(),
                                                      layout.runs.size()));
  }
  for (size_t i = 0; i < update.exponents.size(); ++i) {
    if (update.exponents[i] == kUncalibrated && SumsAreZero(layout, update, i)) continue;
    if (update.exponents[i] < kernels::kMinExponent || update.exponents[i] > kernels::kMaxExponent) {
      return absl::InvalidArgumentError(
          absl::StrFormat("update of round %d, bucket %d: exponent %d of run %d is out of range", update.round,
                          layout.bucket, update.exponents[i], i));
    }
  }
  return absl::OkStatus();
}

bool HasSparseSteps(const v1::OptimizerSpec& optimizer) {
  return optimizer.kind() == v1::OPTIMIZER_STEP &&
         std::all_of(optimizer.groups().begin(), optimizer.groups().end(),
                     [](const v1::OptimizerGroup& group) { return group.weight_decay() == 0; });
}

void ApplyStep(v1::OptimizerKind kind, const GroupStep& step, const RunState& elements, const float* mean, size_t n,
               kernels::Backend& backend, kernels::Stream* stream) {
  switch (kind) {
    case v1::OPTIMIZER_SGD:
      backend.Sgd(elements.parameter, mean, elements.first_moment, n, step.sgd, stream);
      return;
    case v1::OPTIMIZER_ADAMW:
      backend.AdamW(elements.parameter, mean, elements.first_moment, elements.second_moment, n, step.adamw, stream);
      return;
    case v1::OPTIMIZER_LAMB:
      kernels::Lamb(elements.parameter, mean, elements.first_moment, elements.second_moment, n, step.layer);
      return;
    case v1::OPTIMIZER_LANS:
      kernels::Lans(elements.parameter, mean, elements.first_moment, elements.second_moment, n, step.layer);
      return;
    case v1::OPTIMIZER_LION:
      kernels::Lion(elements.parameter, mean, elements.first_moment, n, step.lion);
      return;
    default:
      backend.PlainStep(elements.parameter, mean, n, step.learning_rate, step.weight_decay, stream);
      return;
  }
}

absl::Status ApplyUpdate(const Job& job, const BucketLayout& layout, const Update& update,
                         std::span<const RunState> runs, kernels::Backend& backend) {
  if (update.replaces) return ReplaceParameters(job, layout, update, runs);
  const v1::OptimizerSpec& optimizer = job.spec().optimizer();
  if (!Applies(job, update)) return absl::OkStatus();
  GW_RETURN_IF_ERROR(CheckUpdate(job, layout, update, runs.size()));
  GW_RETURN_IF_ERROR(CheckNorms(job, layout, update));
  for (size_t i = 0; i < runs.size(); ++i) GW_RETURN_IF_ERROR(CheckMemory(job, layout, runs[i], i));
  std::vector<GroupStep> steps = DeriveSteps(job, update);
  const bool pairs = update.body == Update::Body::kSparseFloat;
  const bool sparse = pairs || update.body == Update::Body::kSparse;
  const bool alone = (sparse && HasSparseSteps(optimizer)) || (pairs && IsPlainSgd(optimizer, steps));
  if (alone && !ClipsNorm(job)) {
    ApplySparseSteps(job, layout, update, steps, runs, backend);
    return absl::OkStatus();
  }
  const bool layerwise = optimizer.kind() == v1::OPTIMIZER_LAMB || optimizer.kind() == v1::OPTIMIZER_LANS;
  const float scale = optimizer.kind() == v1::OPTIMIZER_LANS ? 1.0f : static_cast<float>(ClipScale(job, update));
  std::vector<float> mean;
  size_t tensor = 0;  // of the slice
  for (size_t i = 0; i < runs.size(); ++i) {
    const uint32_t index = layout.runs[i].tensor;
    const bool another = i > 0 && index != layout.runs[i - 1].tensor;
    if (another) ++tensor;
    GroupStep& step = steps[job.tensors()[index].group];
    if (layerwise && (i == 0 || another)) step.layer = LayerOf(job, update, step, tensor);
    const size_t n = layout.runs[i].length;
    const float* of_run = scale == 1.0f ? update.MeanInPlace(layout, static_cast<uint32_t>(i)) : nullptr;
    if (of_run == nullptr) {
      if (mean.size() < n) mean.resize(n);
      update.MeanOfRun(layout, static_cast<uint32_t>(i), mean.data());
      if (scale != 1.0f) kernels::Scale(mean.data(), n, scale);
      of_run = mean.data();
    }
    ApplyStep(optimizer.kind(), step, runs[i], of_run, n, backend, nullptr);
  }
  return absl::OkStatus();
}

}  // namespace gradwire

// See device_optimizer.h.
#include "common/optimizer/device_optimizer.h"

#include <utility>

#include "common/base/status_macros.h"
#include "common/job/norms.h"
#include "common/optimizer/steps.h"

namespace gradwire {

using kernels::cuda::DeviceBucket;
using kernels::cuda::JobMemory;
using kernels::cuda::RoundMemory;

DeviceOptimizer::DeviceOptimizer(const Job* job, const BucketLayout* layout, DeviceBucket* bucket)
    : job_(*job), layout_(*layout), bucket_(*bucket), scales_(layout, bucket) {}

absl::Status DeviceOptimizer::Prepare(std::vector<RunState> runs) {
  runs_ = std::move(runs);
  GW_ASSIGN_OR_RETURN(parameters_, bucket_.memory().Take<float*>(runs_.size()));
  GW_ASSIGN_OR_RETURN(rates_, bucket_.memory().Take<float>(runs_.size()));
  std::vector<float*> parameters;
  for (const RunState& run : runs_) parameters.push_back(run.parameter);
  bucket_.Upload(parameters_, parameters.data(), parameters.size() * sizeof(float*));
  return scales_.Allocate();
}

uint64_t DeviceOptimizer::Bytes(const BucketLayout& layout) {
  return JobMemory::Rounded(layout.runs.size(), sizeof(float*)) +
         JobMemory::Rounded(layout.runs.size(), sizeof(float)) + DeviceRuns::Bytes(layout);
}

absl::Status DeviceOptimizer::Apply(const Update& update) {
  const v1::OptimizerSpec& optimizer = job_.spec().optimizer();
  if (update.replaces) return absl::UnimplementedError("parameters on a device cannot be replaced yet");
  if (!Applies(job_, update)) return absl::OkStatus();
  GW_RETURN_IF_ERROR(CheckUpdate(job_, layout_, update, runs_.size()));
  const std::vector<GroupStep> steps = DeriveSteps(job_, update);
  if (update.body == Update::Body::kSparse && HasSparseSteps(optimizer)) {
    scales_.SetExponents(update.exponents);
    std::vector<float> rates;
    for (size_t run = 0; run < runs_.size(); ++run) rates.push_back(steps[GroupOf(run)].learning_rate);
    bucket_.Upload(rates_, rates.data(), rates.size() * sizeof(float));
    GW_ASSIGN_OR_RETURN(const Sparse sparse, UploadSparse(update));
    bucket_.backend().SparsePlainSteps(parameters_, sparse.positions(), sparse.integers(), sparse.count,
                                       scales_.scales(), rates_, update.contributors, bucket_.stream());
    return absl::OkStatus();
  }
  GW_ASSIGN_OR_RETURN(const float* means, MeansOf(update));
  for (size_t first = 0, last = 0; first < runs_.size(); first = last) {
    for (++last; last < runs_.size() && Follows(last);) ++last;
    const uint64_t begin = layout_.run_begin[first];
    ApplyStep(optimizer.kind(), steps[GroupOf(first)], runs_[first], means + begin, layout_.run_begin[last] - begin,
              bucket_.backend(), bucket_.stream());
  }
  return absl::OkStatus();
}

absl::StatusOr<const float*> DeviceOptimizer::MeansOf(const Update& update) {
  float* const means = bucket_.means();
  if (update.integers_of_exponents()) scales_.SetExponents(update.exponents);
  if (update.body == Update::Body::kSparse) {
    bucket_.runtime().Fill(means, 0, layout_.elements * sizeof(float), bucket_.stream());
    GW_ASSIGN_OR_RETURN(const Sparse sparse, UploadSparse(update));
    bucket_.backend().ScatterMeans(sparse.positions(), sparse.integers(), sparse.count, scales_.scales(),
                                   update.contributors, means, bucket_.stream());
    return means;
  }
  if (update.body == Update::Body::kSparseFloat) {
    std::vector<float> dense(layout_.elements);
    for (size_t i = 0; i < update.positions.size(); ++i) dense[update.positions[i]] = update.values[i];
    bucket_.Upload(means, dense.data(), dense.size() * sizeof(float));
    return means;
  }
  const void* values = update.device_values;
  if (values == nullptr) {
    for (const Update::DensePart& part : update.dense) {
      bucket_.Upload(means + part.begin, part.values.data(), part.values.size());
    }
    values = means;
  }
  if (update.body == Update::Body::kDenseFloat) return static_cast<const float*>(values);
  bucket_.backend().MeansOfIntegers(static_cast<const int32_t*>(values), layout_.elements, scales_.scales(),
                                    update.contributors, means, bucket_.stream());
  return means;
}

absl::StatusOr<DeviceOptimizer::Sparse> DeviceOptimizer::UploadSparse(const Update& update) {
  const size_t bytes = update.positions.size() * sizeof(uint32_t);
  GW_ASSIGN_OR_RETURN(RoundMemory memory, RoundMemory::Make(&bucket_, 2 * bytes));
  bucket_.Upload(memory.data(), update.positions.data(), bytes);
  bucket_.Upload(memory.data() + bytes, update.integers.data(), bytes);
  return Sparse{std::move(memory), update.positions.size()};
}

uint32_t DeviceOptimizer::GroupOf(size_t run) const { return job_.tensors()[layout_.runs[run].tensor].group; }

bool DeviceOptimizer::Follows(size_t run) const {
  const uint32_t length = layout_.runs[run - 1].length;
  const auto behind = [length](const float* a, const float* b) {
    return a == nullptr ? b == nullptr : b == a + length;
  };
  const RunState& before = runs_[run - 1];
  return GroupOf(run) == GroupOf(run - 1) && behind(before.parameter, runs_[run].parameter) &&
         behind(before.first_moment, runs_[run].first_moment) && behind(before.second_moment, runs_[run].second_moment);
}

}  // namespace gradwire

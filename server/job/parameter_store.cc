// Parameters in host memory; see parameter_store.h.
#include "server/job/parameter_store.h"

#include <algorithm>
#include <utility>

#include "common/base/large_array.h"
#include "common/base/status_macros.h"
#include "common/codec/update/update.h"
#include "common/optimizer/layerwise.h"
#include "common/optimizer/optimizer.h"
#include "server/job/update_compression.h"

namespace gradwire {
namespace {

class HostStore final : public ParameterStore {
 public:
  HostStore(const Job* job, const BucketLayout* layout, kernels::Backend* backend, UpdateCompression compression)
      : job_(*job), layout_(*layout), backend_(*backend), compression_(std::move(compression)) {
    if (job_.keeps_parameters()) {
      parameters_.resize(layout_.elements);
      if (job_.moments() > 0) first_moment_.resize(layout_.elements);
      if (job_.moments() > 1) second_moment_.resize(layout_.elements);
    }
    for (size_t r = 0; r < layout_.runs.size(); ++r) {
      RunState run;
      const uint64_t begin = layout_.run_begin[r];
      if (!parameters_.empty()) run.parameter = parameters_.data() + begin;
      if (!first_moment_.empty()) run.first_moment = first_moment_.data() + begin;
      if (!second_moment_.empty()) run.second_moment = second_moment_.data() + begin;
      runs_.push_back(run);
    }
  }

  absl::Status Initialize(std::span<const Bytes> chunks) override {
    return DecodeParameters(chunks, job_, layout_, 0, {.parameter = parameters_.data()}).status();
  }

  absl::Status Compress(const RoundPlan& plan, UpdateFrame* update) override {
    return compression_.Compress(plan, update);
  }

  absl::Status ReplayCompression(const RoundPlan& plan, const UpdateFrame& update) override {
    return compression_.Replay(plan, update);
  }

  absl::Status Apply(const UpdateFrame& update, const RoundPlan& plan) override {
    compression_.Settle();
    if (update.decoded != nullptr) return ApplyUpdate(job_, layout_, *update.decoded, runs_, backend_);
    GW_ASSIGN_OR_RETURN(const Update decoded, DecodeUpdate(update.chunks, job_, layout_, plan));
    return ApplyUpdate(job_, layout_, decoded, runs_, backend_);
  }

  absl::StatusOr<std::vector<double>> Squares(const Update& update, size_t phase) override {
    return SquaresOfPhase(job_, layout_, update, runs_, phase);
  }

  std::vector<Bytes> Serialize(const PlanWindow& plans, ParameterContent content) override {
    ParameterArrays arrays;
    if (!parameters_.empty()) arrays.parameter = parameters_.data();
    if (!first_moment_.empty()) arrays.first_moment = first_moment_.data();
    if (!second_moment_.empty()) arrays.second_moment = second_moment_.data();
    arrays.update_residual = compression_.residual();
    return EncodeParameters(layout_, plans, content, arrays);
  }

  void Read(const ParameterTargets& targets) override {
    if (targets.parameter != nullptr) std::copy(parameters_.begin(), parameters_.end(), targets.parameter);
    if (targets.first_moment != nullptr) std::copy(first_moment_.begin(), first_moment_.end(), targets.first_moment);
    if (targets.second_moment != nullptr)
      std::copy(second_moment_.begin(), second_moment_.end(), targets.second_moment);
    if (targets.update_residual != nullptr && compression_.residual() != nullptr)
      std::copy_n(compression_.residual(), layout_.elements, targets.update_residual);
  }

  void Load(const ParameterArrays& arrays) override {
    if (arrays.parameter != nullptr) std::copy_n(arrays.parameter, parameters_.size(), parameters_.begin());
    if (arrays.first_moment != nullptr) std::copy_n(arrays.first_moment, first_moment_.size(), first_moment_.begin());
    if (arrays.second_moment != nullptr)
      std::copy_n(arrays.second_moment, second_moment_.size(), second_moment_.begin());
    if (arrays.update_residual != nullptr) compression_.LoadResidual(arrays.update_residual);
  }

 private:
  const Job& job_;
  const BucketLayout& layout_;
  kernels::Backend& backend_;
  // In position order; empty where the job keeps none.
  LargeArray<float> parameters_;
  LargeArray<float> first_moment_;
  LargeArray<float> second_moment_;
  UpdateCompression compression_;
  std::vector<RunState> runs_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ParameterStore>> MakeHostStore(const Job* job, const BucketLayout* layout,
                                                              kernels::Backend* backend) {
  GW_ASSIGN_OR_RETURN(UpdateCompression compression, UpdateCompression::Make(job, layout, backend));
  return std::make_unique<HostStore>(job, layout, backend, std::move(compression));
}

}  // namespace gradwire

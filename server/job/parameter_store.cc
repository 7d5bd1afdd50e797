// Parameters in host memory; see parameter_store.h.
#include "server/job/parameter_store.h"

#include <algorithm>
#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "common/base/status_macros.h"
#include "common/codec/update/update.h"
#include "common/optimizer/layerwise.h"
#include "common/optimizer/optimizer.h"
#include "common/optimizer/steps.h"
#include "server/job/lent_array.h"
#include "server/job/update_compression.h"

namespace gradwire {
namespace {

// What answers borrow has as many elements; less is copied sooner than lent.
constexpr uint64_t kLeastLent = 16384;

class HostStore final : public ParameterStore {
 public:
  HostStore(const Job* job, const BucketLayout* layout, kernels::Backend* backend, UpdateCompression compression)
      : job_(*job),
        layout_(*layout),
        backend_(*backend),
        parameters_(job_.keeps_parameters() ? layout_.elements : 0),
        first_moment_(job_.keeps_parameters() && job_.moments() > 0 ? layout_.elements : 0),
        second_moment_(job_.keeps_parameters() && job_.moments() > 1 ? layout_.elements : 0),
        compression_(std::move(compression)) {
    runs_.reserve(layout_.runs.size());
  }

  absl::Status Initialize(std::span<const Bytes> chunks) override {
    return DecodeParameters(chunks, job_, layout_, 0, {.parameter = parameters_.Own()}).status();
  }

  absl::Status Compress(const RoundPlan& plan, UpdateFrame* update) override {
    return compression_.Compress(plan, update);
  }

  absl::Status ReplayCompression(const RoundPlan& plan, const UpdateFrame& update) override {
    return compression_.Replay(plan, update);
  }

  absl::Status Apply(const UpdateFrame& update, const RoundPlan& plan) override {
    compression_.Settle();
    if (update.decoded != nullptr) return ApplyDecoded(*update.decoded);
    GW_ASSIGN_OR_RETURN(const Update decoded, DecodeUpdate(update.chunks, job_, layout_, plan));
    return ApplyDecoded(decoded);
  }

  absl::StatusOr<std::vector<double>> Squares(const Update& update, size_t phase) override {
    // They are read alone, so that what was lent may stay lent.
    const auto read = [](const LentArray& array) { return const_cast<float*>(array.data()); };
    Point({read(parameters_), read(first_moment_), read(second_moment_)});
    return SquaresOfPhase(job_, layout_, update, runs_, phase);
  }

  wire::FrameToSend Serialize(const PlanWindow& plans, ParameterContent content) override {
    ParameterArrays arrays;
    if (parameters_.size() != 0) arrays.parameter = parameters_.data();
    if (first_moment_.size() != 0) arrays.first_moment = first_moment_.data();
    if (second_moment_.size() != 0) arrays.second_moment = second_moment_.data();
    arrays.update_residual = compression_.residual();
    const bool large = layout_.elements >= kLeastLent;
    if (large && content == ParameterContent::kFloat32) arrays.lent = parameters_.Lend();
    if (large && content == ParameterContent::kState) {
      arrays.lent = std::make_shared<const std::array<std::shared_ptr<const void>, 3>>(
          std::array{parameters_.Lend(), first_moment_.Lend(), second_moment_.Lend()});
    }
    return EncodeParametersToSend(layout_, plans, content, arrays);
  }

  void Read(const ParameterTargets& targets) override {
    const auto read = [](const LentArray& from, float* to) {
      if (to != nullptr) std::copy_n(from.data(), from.size(), to);
    };
    read(parameters_, targets.parameter);
    read(first_moment_, targets.first_moment);
    read(second_moment_, targets.second_moment);
    if (targets.update_residual != nullptr && compression_.residual() != nullptr)
      std::copy_n(compression_.residual(), layout_.elements, targets.update_residual);
  }

  void Load(const ParameterArrays& arrays) override {
    const auto load = [](const float* from, LentArray& to) {
      if (from != nullptr) std::copy_n(from, to.size(), to.Own());
    };
    load(arrays.parameter, parameters_);
    load(arrays.first_moment, first_moment_);
    load(arrays.second_moment, second_moment_);
    if (arrays.update_residual != nullptr) compression_.LoadResidual(arrays.update_residual);
  }

 private:
  using Where = std::array<float*, 3>;

  absl::Status ApplyDecoded(const Update& update) {
    if (update.replaces || Applies(job_, update)) Point({parameters_.Own(), first_moment_.Own(), second_moment_.Own()});
    return ApplyUpdate(job_, layout_, update, runs_, backend_);
  }

  // What is not there stays null.
  void Point(const Where& where) {
    if (where == where_ && !runs_.empty()) return;
    runs_.clear();
    const auto at = [](float* values, const LentArray& array, uint64_t begin) {
      return array.size() == 0 ? nullptr : values + begin;
    };
    for (size_t r = 0; r < layout_.runs.size(); ++r) {
      const uint64_t begin = layout_.run_begin[r];
      RunState run;
      run.parameter = at(where[0], parameters_, begin);
      run.first_moment = at(where[1], first_moment_, begin);
      run.second_moment = at(where[2], second_moment_, begin);
      runs_.push_back(run);
    }
    where_ = where;
  }

  const Job& job_;
  const BucketLayout& layout_;
  kernels::Backend& backend_;
  // In position order; empty where the job keeps none.
  LentArray parameters_;
  LentArray first_moment_;
  LentArray second_moment_;
  UpdateCompression compression_;
  Where where_ = {};            // the arrays of runs_
  std::vector<RunState> runs_;  // empty until they are used
};

}  // namespace

absl::StatusOr<std::unique_ptr<ParameterStore>> MakeHostStore(const Job* job, const BucketLayout* layout,
                                                              kernels::Backend* backend) {
  GW_ASSIGN_OR_RETURN(UpdateCompression compression, UpdateCompression::Make(job, layout, backend));
  return std::make_unique<HostStore>(job, layout, backend, std::move(compression));
}

}  // namespace gradwire

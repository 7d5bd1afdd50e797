// See device_store.h.
#include "server/job/device_store.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "common/base/status_macros.h"
#include "common/codec/update/update.h"
#include "common/optimizer/device_optimizer.h"
#include "common/optimizer/steps.h"
#include "server/job/update_compression.h"

namespace gradwire {
namespace {

using kernels::cuda::DeviceBucket;
using kernels::cuda::JobMemory;

class DeviceStore final : public ParameterStore {
 public:
  DeviceStore(const Job* job, const BucketLayout* layout, UpdateCompression compression, DeviceBucket* bucket)
      : job_(*job),
        layout_(*layout),
        compression_(std::move(compression)),
        bucket_(*bucket),
        optimizer_(job, layout, bucket) {}

  absl::Status Allocate() {
    if (!job_.keeps_parameters()) return absl::OkStatus();
    GW_ASSIGN_OR_RETURN(arrays_.parameter, TakeZeros());
    if (job_.moments() > 0) {
      GW_ASSIGN_OR_RETURN(arrays_.first_moment, TakeZeros());
    }
    if (job_.moments() > 1) {
      GW_ASSIGN_OR_RETURN(arrays_.second_moment, TakeZeros());
    }
    std::vector<RunState> runs;
    for (size_t run = 0; run < layout_.runs.size(); ++run) runs.push_back(From(layout_.run_begin[run]));
    return optimizer_.Prepare(std::move(runs));
  }

  absl::Status Initialize(std::span<const Bytes> chunks) override {
    std::vector<float> parameters(layout_.elements);
    GW_RETURN_IF_ERROR(DecodeParameters(chunks, job_, layout_, 0, {.parameter = parameters.data()}).status());
    Load({.parameter = parameters.data()});
    return absl::OkStatus();
  }

  absl::Status Compress(const RoundPlan& plan, UpdateFrame* update) override {
    return compression_.Compress(plan, update);
  }
  absl::Status ReplayCompression(const RoundPlan& plan, const UpdateFrame& update) override {
    return compression_.Replay(plan, update);
  }

  // Returns when everything is launched.
  absl::Status Apply(const UpdateFrame& frame, const RoundPlan& plan) override {
    compression_.Settle();
    std::shared_ptr<const Update> update = frame.decoded;
    if (update == nullptr) {
      GW_ASSIGN_OR_RETURN(Update decoded, DecodeUpdate(frame.chunks, job_, layout_, plan));
      update = std::make_shared<const Update>(std::move(decoded));
    }
    return optimizer_.Apply(*update);
  }

  absl::StatusOr<std::vector<double>> Squares(const Update&, size_t) override {
    return absl::UnimplementedError("norms are not there on a device");
  }

  wire::FrameToSend Serialize(const PlanWindow& plans, ParameterContent content) override {
    std::vector<float> copies[3];
    ParameterArrays arrays;
    const auto copy = [&](const float* array, std::vector<float>* to) -> const float* {
      if (array == nullptr) return nullptr;
      to->resize(layout_.elements);
      Download(array, to->data());
      return to->data();
    };
    arrays.parameter = copy(arrays_.parameter, &copies[0]);
    if (content == ParameterContent::kState || content == ParameterContent::kShard) {
      arrays.first_moment = copy(arrays_.first_moment, &copies[1]);
      arrays.second_moment = copy(arrays_.second_moment, &copies[2]);
    }
    arrays.update_residual = compression_.residual();
    return EncodeParameters(layout_, plans, content, arrays);
  }

  void Read(const ParameterTargets& targets) override {
    if (targets.parameter != nullptr) Download(arrays_.parameter, targets.parameter);
    if (targets.first_moment != nullptr) Download(arrays_.first_moment, targets.first_moment);
    if (targets.second_moment != nullptr) Download(arrays_.second_moment, targets.second_moment);
    if (targets.update_residual != nullptr && compression_.residual() != nullptr)
      std::copy_n(compression_.residual(), layout_.elements, targets.update_residual);
  }

  void Load(const ParameterArrays& arrays) override {
    const size_t bytes = layout_.elements * sizeof(float);
    if (arrays.parameter != nullptr) bucket_.Upload(arrays_.parameter, arrays.parameter, bytes);
    if (arrays.first_moment != nullptr) bucket_.Upload(arrays_.first_moment, arrays.first_moment, bytes);
    if (arrays.second_moment != nullptr) bucket_.Upload(arrays_.second_moment, arrays.second_moment, bytes);
    if (arrays.update_residual != nullptr) compression_.LoadResidual(arrays.update_residual);
  }

 private:
  absl::StatusOr<float*> TakeZeros() {
    GW_ASSIGN_OR_RETURN(float* const array, bucket_.memory().Take<float>(layout_.elements));
    bucket_.runtime().Fill(array, 0, layout_.elements * sizeof(float), bucket_.stream());
    return array;
  }

  RunState From(uint64_t begin) const {
    const auto from = [begin](float* array) { return array == nullptr ? nullptr : array + begin; };
    return {from(arrays_.parameter), from(arrays_.first_moment), from(arrays_.second_moment)};
  }

  // Memory of the host is not pinned: the copy is there on return.
  void Download(const float* array, float* to) {
    if (array != nullptr) bucket_.runtime().ToHost(to, array, layout_.elements * sizeof(float), bucket_.stream());
  }

  const Job& job_;
  const BucketLayout& layout_;
  UpdateCompression compression_;
  DeviceBucket& bucket_;
  DeviceOptimizer optimizer_;
  ParameterTargets arrays_;  // in device memory, in position order; null where the job keeps none
};

}  // namespace

absl::StatusOr<std::unique_ptr<ParameterStore>> MakeDeviceStore(const Job* job, const BucketLayout* layout,
                                                                kernels::Backend* backend, DeviceBucket* bucket) {
  GW_ASSIGN_OR_RETURN(UpdateCompression compression, UpdateCompression::Make(job, layout, backend));
  auto store = std::make_unique<DeviceStore>(job, layout, std::move(compression), bucket);
  GW_RETURN_IF_ERROR(store->Allocate());
  return store;
}

uint64_t DeviceStoreBytes(const Job& job, const BucketLayout& layout) {
  if (!job.keeps_parameters()) return 0;
  return static_cast<uint64_t>(1 + job.moments()) * JobMemory::Rounded(layout.elements, sizeof(float)) +
         DeviceOptimizer::Bytes(layout);
}

bool NeedsMeans(const Job& job, const BucketLayout& layout) {
  return job.keeps_parameters() &&
         (!HasSparseSteps(job.spec().optimizer()) || job.update_codecs()[layout.codec].has_value());
}

}  // namespace gradwire

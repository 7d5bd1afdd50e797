// See device_store.h.
#include "server/job/device_store.h"

#include <algorithm>
#include <utility>

#include "common/base/status_macros.h"
#include "common/codec/device/device_runs.h"
#include "common/codec/update.h"
#include "common/optimizer/steps.h"

namespace gradwire {
namespace {

using kernels::cuda::DeviceBucket;
using kernels::cuda::JobMemory;
using kernels::cuda::RoundMemory;

class DeviceStore final : public ParameterStore {
 public:
  DeviceStore(const Job* job, const BucketLayout* layout, DeviceBucket* bucket)
      : job_(*job), layout_(*layout), bucket_(*bucket), runs_(layout, bucket) {}

  absl::Status Allocate() {
    if (!job_.keeps_parameters()) return absl::OkStatus();
    GW_ASSIGN_OR_RETURN(arrays_.parameter, TakeZeros());
    if (job_.moments() > 0) {
      GW_ASSIGN_OR_RETURN(arrays_.first_moment, TakeZeros());
    }
    if (job_.moments() > 1) {
      GW_ASSIGN_OR_RETURN(arrays_.second_moment, TakeZeros());
    }
    GW_ASSIGN_OR_RETURN(rates_, bucket_.memory().Take<float>(layout_.runs.size()));
    return runs_.Allocate();
  }

  absl::Status Initialize(std::span<const Bytes> chunks) override {
    std::vector<float> parameters(layout_.elements);
    GW_RETURN_IF_ERROR(DecodeParameters(chunks, job_, layout_, 0, {.parameter = parameters.data()}).status());
    Load({.parameter = parameters.data()});
    return absl::OkStatus();
  }

  // A bucket on a device has no update codec (JobShard::Prepare).
  absl::Status Compress(const RoundPlan&, UpdateFrame*) override { return absl::OkStatus(); }
  absl::Status ReplayCompression(const RoundPlan&, const UpdateFrame&) override { return absl::OkStatus(); }

  // Returns when everything is launched.
  absl::Status Apply(const UpdateFrame& frame, const RoundPlan& plan) override {
    std::shared_ptr<const Update> update = frame.decoded;
    if (update == nullptr) {
      GW_ASSIGN_OR_RETURN(Update decoded, DecodeUpdate(frame.chunks, job_, layout_, plan));
      update = std::make_shared<const Update>(std::move(decoded));
    }
    if (!Applies(job_, *update)) return absl::OkStatus();
    GW_RETURN_IF_ERROR(CheckUpdate(job_, layout_, *update, layout_.runs.size()));
    const std::vector<GroupStep> steps = DeriveSteps(job_.spec().optimizer(), *update);
    if (update->integers_of_exponents()) runs_.SetExponents(update->exponents);
    if (update->body == Update::Body::kSparse && HasSparseSteps(job_.spec().optimizer())) {
      return ApplySparse(*update, steps);
    }
    GW_ASSIGN_OR_RETURN(const float* means, MeansOf(*update));
    // One launch for all that is of one parameter group.
    for (size_t first = 0, last = 0; first < layout_.runs.size(); first = last) {
      const uint32_t group = GroupOf(first);
      while (last < layout_.runs.size() && GroupOf(last) == group) ++last;
      const uint64_t begin = layout_.run_begin[first];
      ApplyStep(job_.spec().optimizer().kind(), steps[group], From(begin), means + begin,
                layout_.run_begin[last] - begin, bucket_.backend(), bucket_.stream());
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<double>> Squares(const Update&, size_t) override {
    return absl::UnimplementedError("norms are not there on a device");
  }

  std::vector<Bytes> Serialize(const PlanWindow& plans, ParameterContent content) override {
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
    return EncodeParameters(layout_, plans, content, arrays);
  }

  void Read(const ParameterTargets& targets) override {
    if (targets.parameter != nullptr) Download(arrays_.parameter, targets.parameter);
    if (targets.first_moment != nullptr) Download(arrays_.first_moment, targets.first_moment);
    if (targets.second_moment != nullptr) Download(arrays_.second_moment, targets.second_moment);
  }

  void Load(const ParameterArrays& arrays) override {
    const size_t bytes = layout_.elements * sizeof(float);
    if (arrays.parameter != nullptr) bucket_.Upload(arrays_.parameter, arrays.parameter, bytes);
    if (arrays.first_moment != nullptr) bucket_.Upload(arrays_.first_moment, arrays.first_moment, bytes);
    if (arrays.second_moment != nullptr) bucket_.Upload(arrays_.second_moment, arrays.second_moment, bytes);
  }

 private:
  absl::StatusOr<float*> TakeZeros() {
    GW_ASSIGN_OR_RETURN(float* const array, bucket_.memory().Take<float>(layout_.elements));
    bucket_.runtime().Fill(array, 0, layout_.elements * sizeof(float), bucket_.stream());
    return array;
  }

  // Memory of the host is not pinned: the copy is there on return.
  void Download(const float* array, float* to) {
    if (array != nullptr) bucket_.runtime().ToHost(to, array, layout_.elements * sizeof(float), bucket_.stream());
  }

  uint32_t GroupOf(size_t run) const { return job_.tensors()[layout_.runs[run].tensor].group; }

  RunState From(uint64_t begin) const {
    const auto from = [begin](float* array) { return array == nullptr ? nullptr : array + begin; };
    return {from(arrays_.parameter), from(arrays_.first_moment), from(arrays_.second_moment)};
  }

  // Positions and integers of a sparse update, in device memory.
  struct Sparse {
    RoundMemory memory;
    size_t count;
    const uint32_t* positions() const { return reinterpret_cast<const uint32_t*>(memory.data()); }
    const int32_t* integers() const { return reinterpret_cast<const int32_t*>(positions() + count); }
  };
  absl::StatusOr<Sparse> UploadSparse(const Update& update) {
    const size_t bytes = update.positions.size() * sizeof(uint32_t);
    GW_ASSIGN_OR_RETURN(RoundMemory memory, RoundMemory::Make(&bucket_, 2 * bytes));
    bucket_.Upload(memory.data(), update.positions.data(), bytes);
    bucket_.Upload(memory.data() + bytes, update.integers.data(), bytes);
    return Sparse{std::move(memory), update.positions.size()};
  }

  absl::Status ApplySparse(const Update& update, std::span<const GroupStep> steps) {
    std::vector<float> rates;
    for (size_t run = 0; run < layout_.runs.size(); ++run) rates.push_back(steps[GroupOf(run)].learning_rate);
    bucket_.Upload(rates_, rates.data(), rates.size() * sizeof(float));
    GW_ASSIGN_OR_RETURN(const Sparse sparse, UploadSparse(update));
    bucket_.backend().SparsePlainSteps(arrays_.parameter, sparse.positions(), sparse.integers(), sparse.count,
                                       runs_.scales(), rates_, update.contributors, bucket_.stream());
    return absl::OkStatus();
  }

  // The means of all elements, in device memory until the next launch that writes DeviceBucket::means.
  absl::StatusOr<const float*> MeansOf(const Update& update) {
    float* const means = bucket_.means();
    if (update.body == Update::Body::kSparse) {
      bucket_.runtime().Fill(means, 0, layout_.elements * sizeof(float), bucket_.stream());
      GW_ASSIGN_OR_RETURN(const Sparse sparse, UploadSparse(update));
      bucket_.backend().ScatterMeans(sparse.positions(), sparse.integers(), sparse.count, runs_.scales(),
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
    bucket_.backend().MeansOfIntegers(static_cast<const int32_t*>(values), layout_.elements, runs_.scales(),
                                      update.contributors, means, bucket_.stream());
    return means;
  }

  const Job& job_;
  const BucketLayout& layout_;
  DeviceBucket& bucket_;
  DeviceRuns runs_;

  // In device memory; null where the job keeps none.
  ParameterTargets arrays_;  // in position order
  float* rates_ = nullptr;   // per run: learning rates of the update that is being applied
};

}  // namespace

absl::StatusOr<std::unique_ptr<ParameterStore>> MakeDeviceStore(const Job* job, const BucketLayout* layout,
                                                                DeviceBucket* bucket) {
  auto store = std::make_unique<DeviceStore>(job, layout, bucket);
  GW_RETURN_IF_ERROR(store->Allocate());
  return store;
}

uint64_t DeviceStoreBytes(const Job& job, const BucketLayout& layout) {
  if (!job.keeps_parameters()) return 0;
  return static_cast<uint64_t>(1 + job.moments()) * JobMemory::Rounded(layout.elements, sizeof(float)) +
         DeviceRuns::Bytes(layout) + JobMemory::Rounded(layout.runs.size(), sizeof(float));
}

bool NeedsMeans(const Job& job) { return job.keeps_parameters() && !HasSparseSteps(job.spec().optimizer()); }

}  // namespace gradwire

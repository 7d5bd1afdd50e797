// Tensors in the memory of a device; see tensor_memory.h. Each side has a stream: gradients are taken in, selected and
// encoded on one, updates applied on the other.
#include <algorithm>
#include <cstring>
#include <optional>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/internal/tensor_memory.h"
#include "common/base/status_macros.h"
#include "common/codec/frame/device_places.h"
#include "common/codec/frame/device_return.h"
#include "common/job/codec_spec.h"
#include "common/job/norms.h"
#include "common/optimizer/device_optimizer.h"
#include "kernels/cuda/device_bucket.h"

namespace gradwire::client {
namespace {

using kernels::cuda::DeviceBucket;
using kernels::cuda::DeviceSelection;
using kernels::cuda::DeviceShare;
using kernels::cuda::Event;
using kernels::cuda::JobMemory;
using kernels::cuda::RoundMemory;
using kernels::cuda::RunPlace;

// Chunks on their way up: small beside what a training loop has, and enough for the bus.
constexpr DeviceShare::Options kShare = {.ring_slots = 16, .ring_slot_bytes = 1u << 18};
// Of a frame's results; what is larger comes down through memory that is not pinned.
constexpr uint64_t kMostPinnedBytes = 64u << 20;

class DeviceSteps final : public SliceSteps {
 public:
  DeviceSteps(const Job* job, const BucketLayout* slice, DeviceBucket* bucket, std::vector<RunState> runs)
      : slice_(*slice), bucket_(*bucket), runs_(std::move(runs)), optimizer_(job, slice, bucket) {
    prepared_ = optimizer_.Prepare(runs_);
  }

  absl::Status Apply(const Update& update) override {
    GW_RETURN_IF_ERROR(prepared_);
    return optimizer_.Apply(update);
  }

  absl::Status WriteMean(const Update& update) override {
    GW_RETURN_IF_ERROR(prepared_);
    const float* means = nullptr;
    if (update.contributors != 0 && update.body != Update::Body::kEmpty) {
      GW_ASSIGN_OR_RETURN(means, optimizer_.MeansOf(update));
    }
    if (!outputs_) {
      const auto fill = [&](size_t run, RunPlace* place) { place->x = runs_[run].parameter; };
      GW_ASSIGN_OR_RETURN(DevicePlaces places, DevicePlaces::Make(slice_, &bucket_, fill));
      outputs_.emplace(std::move(places));
    }
    if (means == nullptr) {
      bucket_.runtime().Fill(bucket_.means(), 0, slice_.elements * sizeof(float), bucket_.stream());
      means = bucket_.means();
    }
    bucket_.backend().CopyToRuns(means, outputs_->runs(), bucket_.stream());
    return absl::OkStatus();
  }

 private:
  const BucketLayout& slice_;
  DeviceBucket& bucket_;
  const std::vector<RunState> runs_;
  DeviceOptimizer optimizer_;
  absl::Status prepared_;
  std::optional<DevicePlaces> outputs_;  // of means
};

// What a session takes; follows from the options.
struct Needs {
  uint64_t device_bytes = 0;
  uint64_t pinned_bytes = 0;
  uint64_t means = 0;  // of the largest slice
};

Needs NeedsOf(const DeviceMemoryOptions& options) {
  const Job& job = *options.job;
  const uint64_t tensors = job.tensors().size();
  const int moments = options.applies_updates ? job.moments() : 0;
  const int of_gradients = 1 + (job.spec().push() == v1::PUSH_STEP ? 1 : 0);
  const int arrays = of_gradients * (SkipsNonFinite(job) ? 2 : 1) + moments;  // of the round before as well
  Needs needs;
  for (const Tensor& tensor : job.tensors())
    needs.device_bytes += static_cast<uint64_t>(arrays) * JobMemory::Rounded(tensor.elements, sizeof(float));
  uint64_t most_runs = 0;
  for (const BucketLayout& layout : options.layout->slices()) {
    needs.device_bytes += DeviceOptimizer::Bytes(layout);
    needs.means = std::max(needs.means, layout.elements);
    most_runs = std::max<uint64_t>(most_runs, layout.runs.size());
  }
  needs.device_bytes += JobMemory::Rounded(needs.means, sizeof(float)) + JobMemory::Rounded(tensors, sizeof(uint64_t)) +
                        JobMemory::Rounded(tensors, sizeof(DeviceSelection));
  const uint64_t results = needs.means * sizeof(float) + most_runs * sizeof(uint64_t);
  needs.pinned_bytes = std::min(std::max(results, tensors * sizeof(uint64_t)), kMostPinnedBytes);
  return needs;
}

class DeviceMemory final : public TensorMemory {
 public:
  explicit DeviceMemory(kernels::cuda::AsyncBackend* device)
      : backend_(*device),
        runtime_(device->runtime()),
        ready_(runtime_.NewEvent()),
        sides_{runtime_.NewEvent(), runtime_.NewEvent()} {}
  ~DeviceMemory() override {
    if (gradients_ != nullptr) runtime_.Synchronize(gradients_->stream());
    if (replica_ != nullptr) runtime_.Synchronize(replica_->stream());
    for (Event* event : announced_) runtime_.DeleteEvent(event);
    for (Event* event : {ready_, sides_[0], sides_[1]}) runtime_.DeleteEvent(event);
  }

  absl::Status Prepare(const DeviceMemoryOptions& options) {
    const Needs needs = NeedsOf(options);
    GW_ASSIGN_OR_RETURN(share_, DeviceShare::Make(&backend_, kShare));
    GW_ASSIGN_OR_RETURN(memory_, share_->budget().Admit(needs.device_bytes));
    GW_ASSIGN_OR_RETURN(gradients_, DeviceBucket::Make(share_.get(), memory_.get(), 0, needs.pinned_bytes));
    GW_ASSIGN_OR_RETURN(replica_, DeviceBucket::Make(share_.get(), memory_.get(), needs.means, 0));
    const size_t tensors = options.job->tensors().size();
    GW_ASSIGN_OR_RETURN(first_bad_, memory_->Take<uint64_t>(tensors));
    GW_ASSIGN_OR_RETURN(selections_, memory_->Take<DeviceSelection>(tensors));
    for (const Codec* codec : options.codecs) {
      GW_ASSIGN_OR_RETURN(encoders_[codec], codec->NewDeviceEncoder(gradients_.get()));
    }
    for (size_t t = 0; t < tensors; ++t) announced_.push_back(runtime_.NewEvent());
    found_bad_.resize(tensors);
    known_.resize(tensors);
    return absl::OkStatus();
  }

  bool on_host() const override { return false; }

  std::span<float> Allocate(uint64_t elements) override {
    float* const array = memory_->Take<float>(elements).value();  // NeedsOf counts it
    runtime_.Fill(array, 0, elements * sizeof(float), replica_->stream());
    runtime_.Synchronize(replica_->stream());  // either side may be the first to use it
    return {array, elements};
  }
  void ToHost(std::span<const float> from, float* to) override {
    runtime_.Synchronize(gradients_->stream());
    runtime_.ToHost(to, from.data(), from.size_bytes(), replica_->stream());
  }
  HostView View(std::span<const float> values) override {
    HostView view;
    view.copy.resize(values.size());
    ToHost(values, view.copy.data());
    view.values = view.copy;
    return view;
  }
  void Fill(std::span<float> to, absl::FunctionRef<void(float*)> write) override {
    const auto values = std::make_unique_for_overwrite<float[]>(to.size());
    write(values.get());
    replica_->Upload(to.data(), values.get(), to.size_bytes());
  }
  int64_t FindNonFinite(std::span<const float> values) override {
    return backend_.FindNonFinite(values.data(), values.size(), replica_->stream());
  }
  void Wait() override {
    runtime_.Synchronize(gradients_->stream());
    runtime_.Synchronize(replica_->stream());
  }

  void Announce(uint32_t tensor, kernels::Stream* stream) override {
    if (tensor < announced_.size()) runtime_.Record(announced_[tensor], stream);
  }
  void FindOutOfGrid(uint32_t tensor, std::span<const float> gradient, uint32_t limit_bits) override {
    runtime_.Wait(gradients_->stream(), announced_[tensor]);
    backend_.FindOutOfGridAsync(reinterpret_cast<const uint8_t*>(gradient.data()), sizeof(float), gradient.size(),
                                limit_bits, first_bad_ + tensor, gradients_->stream());
    known_[tensor] = false;
  }
  // One wait for all that were looked through until now.
  int64_t FirstOutOfGrid(uint32_t tensor) override {
    if (!known_[tensor]) {
      const size_t bytes = found_bad_.size() * sizeof(uint64_t);
      std::memcpy(found_bad_.data(), gradients_->Fetch(first_bad_, bytes, &spill_), bytes);
      known_.assign(known_.size(), true);
    }
    return static_cast<int64_t>(found_bad_[tensor]);
  }
  void TakeIn(const Intake& in, std::optional<uint32_t> checked) override {
    backend_.TakeIn(in.pending.data(), in.gradient.data(), in.second_moment.empty() ? nullptr : in.second_moment.data(),
                    in.pending.size(), in.decay, in.precondition, checked ? first_bad_ + *checked : nullptr,
                    gradients_->stream());
  }
  Choice Select(uint32_t tensor, std::span<const float> pending, double density, kernels::Accuracy accuracy) override {
    backend_.FindThresholdAsync(pending.data(), pending.size(), density * static_cast<double>(pending.size()), accuracy,
                                selections_ + tensor, gradients_->stream());
    return {{}, selections_ + tensor};
  }
  Encoder* EncoderOf(const Codec& codec) override { return encoders_.at(&codec).get(); }
  void Zero(std::span<float> values) override {
    runtime_.Fill(values.data(), 0, values.size_bytes(), gradients_->stream());
  }
  void Add(std::span<const float> from, float* to) override {
    backend_.Add(to, from.data(), from.size(), gradients_->stream());
  }
  void Copy(std::span<const float> from, std::span<float> to) override {
    runtime_.Copy(to.data(), from.data(), from.size_bytes(), gradients_->stream());
  }
  absl::StatusOr<const float*> Hold(std::vector<float> values) override {
    const size_t bytes = values.size() * sizeof(float);
    GW_ASSIGN_OR_RETURN(RoundMemory memory, RoundMemory::Make(gradients_.get(), bytes));
    gradients_->Upload(memory.data(), values.data(), bytes);
    return reinterpret_cast<const float*>(held_.emplace_back(std::move(memory)).data());
  }
  void ReleaseHeld() override { held_.clear(); }

  void After(kernels::Stream* stream) override {
    runtime_.Record(ready_, stream);
    runtime_.Wait(replica_->stream(), ready_);
  }
  absl::Status Return(const BucketLayout& slice, const Codec&, const EncodedFrame& frame,
                      const std::vector<uint32_t>* positions, std::span<float* const> residual) override {
    runtime_.Record(sides_[0], gradients_->stream());
    runtime_.Wait(replica_->stream(), sides_[0]);
    GW_RETURN_IF_ERROR(ReturnOnDevice(slice, frame, positions, residual, replica_.get()));
    runtime_.Record(sides_[1], replica_->stream());
    runtime_.Wait(gradients_->stream(), sides_[1]);
    return absl::OkStatus();
  }
  std::unique_ptr<SliceSteps> NewSteps(const Job* job, const BucketLayout* slice, std::vector<RunState> runs) override {
    return std::make_unique<DeviceSteps>(job, slice, replica_.get(), std::move(runs));
  }

 private:
  kernels::cuda::AsyncBackend& backend_;
  kernels::cuda::DeviceRuntime& runtime_;
  std::vector<Event*> announced_;  // per tensor
  Event* const ready_;
  Event* const sides_[2];  // in Return: from the gradients' side to the replica's, and back
  std::unique_ptr<DeviceShare> share_;
  std::unique_ptr<JobMemory> memory_;
  std::unique_ptr<DeviceBucket> gradients_;
  std::unique_ptr<DeviceBucket> replica_;
  std::unordered_map<const Codec*, std::unique_ptr<Encoder>> encoders_;
  std::vector<RoundMemory> held_;

  // Per tensor, in device memory.
  uint64_t* first_bad_ = nullptr;
  DeviceSelection* selections_ = nullptr;
  // Copies of first_bad_, where they are known.
  std::vector<uint64_t> found_bad_;
  std::vector<bool> known_;
  std::vector<uint8_t> spill_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<TensorMemory>> MakeDeviceMemory(const DeviceMemoryOptions& options) {
  auto memory = std::make_shared<DeviceMemory>(options.device);
  if (const absl::Status prepared = memory->Prepare(options); !prepared.ok())
    return absl::Status(prepared.code(),
                        absl::StrCat("the tensors of a session on a device: ", std::string(prepared.message())));
  return memory;
}

}  // namespace gradwire::client

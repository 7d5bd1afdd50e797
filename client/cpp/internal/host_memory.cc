// Tensors in host memory; see tensor_memory.h.
#include <algorithm>
#include <cstring>
#include <deque>
#include <unordered_map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/internal/tensor_memory.h"
#include "common/base/large_array.h"
#include "common/codec/select/select.h"

namespace gradwire::client {
namespace {

class HostSteps final : public SliceSteps {
 public:
  HostSteps(const Job* job, const BucketLayout* slice, std::vector<RunState> runs, kernels::Backend* backend)
      : job_(*job), slice_(*slice), runs_(std::move(runs)), backend_(*backend) {}

  absl::Status Apply(const Update& update) override { return ApplyUpdate(job_, slice_, update, runs_, backend_); }

  absl::Status WriteMean(const Update& update) override {
    for (uint32_t i = 0; i < runs_.size(); ++i) {
      if (runs_[i].parameter == nullptr) continue;
      if (update.contributors == 0 || update.body == Update::Body::kEmpty)
        std::memset(runs_[i].parameter, 0, slice_.runs[i].length * sizeof(float));
      else
        update.MeanOfRun(slice_, i, runs_[i].parameter);
    }
    return absl::OkStatus();
  }

 private:
  const Job& job_;
  const BucketLayout& slice_;
  const std::vector<RunState> runs_;
  kernels::Backend& backend_;
};

class HostMemory final : public TensorMemory {
 public:
  explicit HostMemory(kernels::Backend* backend) : backend_(*backend) {}
  bool on_host() const override { return true; }

  std::span<float> Allocate(uint64_t elements) override {
    absl::MutexLock lock(&mu_);
    return arrays_.emplace_back(elements);
  }
  void ToHost(std::span<const float> from, float* to) override { std::copy(from.begin(), from.end(), to); }
  HostView View(std::span<const float> values) override { return {{}, values}; }
  void Fill(std::span<float> to, absl::FunctionRef<void(float*)> write) override { write(to.data()); }
  int64_t FindNonFinite(std::span<const float> values) override { return gradwire::FindNonFinite(values, backend_); }
  void Wait() override {}

  void Announce(uint32_t, kernels::Stream*) override {}
  void FindOutOfGrid(uint32_t tensor, std::span<const float> gradient, uint32_t limit_bits) override {
    const int64_t first = backend_.FindOutOfGrid(reinterpret_cast<const uint8_t*>(gradient.data()), sizeof(float),
                                                 gradient.size(), limit_bits, nullptr);
    absl::MutexLock lock(&mu_);
    if (first_bad_.size() <= tensor) first_bad_.resize(tensor + 1);
    first_bad_[tensor] = first;
  }
  int64_t FirstOutOfGrid(uint32_t tensor) override {
    absl::MutexLock lock(&mu_);
    return first_bad_[tensor];
  }
  void TakeIn(const Intake& in, std::optional<uint32_t> checked) override {
    if (checked && FirstOutOfGrid(*checked) >= 0) return;
    if (in.decay != 1.0f) {
      for (float& x : in.pending) x *= in.decay;
    }
    if (!in.second_moment.empty()) {
      backend_.AddPreconditioned(in.pending.data(), in.gradient.data(), in.second_moment.data(), in.pending.size(),
                                 in.precondition, nullptr);
    } else if (!in.velocity.empty()) {
      AddVelocityToPending(in.gradient, in.velocity_rule, in.velocity, in.pending);
    } else {
      AddToPending(in.gradient, in.pending, backend_);
    }
  }
  Choice Select(uint32_t, std::span<const float> pending, double density, kernels::Accuracy accuracy) override {
    return {SelectThreshold(pending, density, accuracy, backend_)};
  }
  Encoder* EncoderOf(const Codec& codec) override {
    std::unique_ptr<Encoder>& encoder = encoders_[&codec];
    if (encoder == nullptr) encoder = codec.NewEncoder();
    return encoder.get();
  }
  void Zero(std::span<float> values) override { std::memset(values.data(), 0, values.size_bytes()); }
  void Add(std::span<const float> from, float* to) override { backend_.Add(to, from.data(), from.size(), nullptr); }
  void Copy(std::span<const float> from, std::span<float> to) override {
    std::copy(from.begin(), from.end(), to.begin());
  }
  absl::StatusOr<const float*> Hold(std::vector<float> values) override {
    absl::MutexLock lock(&mu_);
    return held_.emplace_back(std::move(values)).data();
  }
  void ReleaseHeld() override {
    absl::MutexLock lock(&mu_);
    held_.clear();
  }

  void After(kernels::Stream*) override {}
  absl::Status Return(const BucketLayout&, const Codec& codec, const EncodedFrame& frame,
                      const std::vector<uint32_t>* positions, std::span<float* const> residual) override {
    return codec.Return(frame, positions, residual);
  }
  std::unique_ptr<SliceSteps> NewSteps(const Job* job, const BucketLayout* slice, std::vector<RunState> runs) override {
    return std::make_unique<HostSteps>(job, slice, std::move(runs), &backend_);
  }

 private:
  kernels::Backend& backend_;
  std::unordered_map<const Codec*, std::unique_ptr<Encoder>> encoders_;
  absl::Mutex mu_;
  std::deque<LargeArray<float>> arrays_ ABSL_GUARDED_BY(mu_);
  std::vector<int64_t> first_bad_ ABSL_GUARDED_BY(mu_);  // per tensor
  std::vector<std::vector<float>> held_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

std::shared_ptr<TensorMemory> MakeHostMemory(kernels::Backend* backend) {
  return std::make_shared<HostMemory>(backend);
}

}  // namespace gradwire::client

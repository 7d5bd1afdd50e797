// See gradients.h.
#include "client/cpp/internal/gradients.h"

#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/codec/select.h"

namespace gradwire::client {

GradientStore::GradientStore(const Job* job, std::vector<const Codec*> codecs, kernels::Backend* backend)
    : job_(job), backend_(backend), tensors_(job->tensors().size()) {
  const bool step = job->spec().push() == v1::PUSH_STEP;
  for (size_t t = 0; t < tensors_.size(); ++t) {
    State& state = tensors_[t];
    const uint64_t elements = job->tensors()[t].elements;
    state.codec = codecs[t];
    if (state.codec == nullptr) continue;
    if (state.codec->uses_residual() || step) state.pending.assign(elements, 0.0f);
    if (step) state.second_moment.assign(elements, 0.0f);
    if (state.codec->velocity()) state.velocity.assign(elements, 0.0f);
  }
}

absl::Status GradientStore::Ingest(uint32_t tensor, const float* gradient, uint64_t round) {
  State& state = tensors_[tensor];
  if (state.codec == nullptr) return absl::OkStatus();
  const Tensor& info = job_->tensors()[tensor];
  std::span<const float> values(gradient, info.elements);
  // Non-finite, or so large that it would never leave the residual again (2^18 and more).
  const auto* bytes = reinterpret_cast<const uint8_t*>(gradient);
  if (const int64_t bad = backend_->FindOutOfGrid(bytes, sizeof(float), values.size(), nullptr); bad >= 0) {
    const bool finite = std::isfinite(values[static_cast<size_t>(bad)]);
    if (job_->spec().nonfinite() != v1::NONFINITE_SANITIZE) {
      state.source = nullptr;
      return absl::InvalidArgumentError(absl::StrCat(
          "the gradient of tensor '", info.name, "' has a ", finite ? "huge" : "non-finite", " element in round ",
          round, ": index ", bad, " is ", values[static_cast<size_t>(bad)],
          finite ? " (magnitudes must be below 262144)" : "",
          "; this worker contributes nothing to the buckets of this tensor. Look at the loss and the learning rate, or "
          "set the job's policy for non-finite values to sanitize"));
    }
    state.sanitized.assign(values.begin(), values.end());
    for (float& x : state.sanitized) {
      if (std::fabs(x) < static_cast<float>(1 << kernels::kGridRangeBits)) continue;  // false for NaN
      x = 0.0f;
      sanitized_elements_.fetch_add(1, std::memory_order_relaxed);
    }
    values = state.sanitized;
  }
  if (job_->spec().push() == v1::PUSH_STEP) {
    const float decay = job_->spec().step().residual_decay();
    if (decay != 1.0f && state.codec->sparse()) {
      for (float& x : state.pending) x *= decay;
    }
    AddStepToPending(values, state.second_moment, state.pending, job_->spec().step().beta2(),
                     job_->spec().step().epsilon(), ++state.steps, *backend_);
  } else if (const std::optional<VelocityRule> rule = state.codec->velocity()) {
    AddVelocityToPending(values, *rule, state.velocity, state.pending);
  } else if (!state.pending.empty()) {
    AddToPending(values, state.pending, *backend_);
  }
  state.from_pending = !state.pending.empty();
  state.source = state.from_pending ? state.pending.data() : values.data();
  return absl::OkStatus();
}

void GradientStore::Select(uint32_t tensor, uint64_t round) {
  State& state = tensors_[tensor];
  if (state.codec == nullptr || !state.codec->selects()) return;
  const double density = state.codec->Density(round);
  state.selection = SelectThreshold(state.pending, density, *backend_);
}

std::vector<RunInput> GradientStore::InputsOf(const BucketLayout& layout) {
  std::vector<RunInput> inputs(layout.runs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Run& run = layout.runs[i];
    State& state = tensors_[run.tensor];
    if (state.codec->uses_residual())
      inputs[i].pending = state.pending.data() + run.offset;
    else if (state.source != nullptr)
      inputs[i].gradient = state.source + run.offset;
    inputs[i].selection = state.selection;
    if (!state.velocity.empty()) inputs[i].velocity = state.velocity.data() + run.offset;
  }
  return inputs;
}

std::vector<float*> GradientStore::ResidualOf(const BucketLayout& layout) {
  std::vector<float*> residual(layout.runs.size());
  for (size_t i = 0; i < residual.size(); ++i) residual[i] = ResidualOf(layout.runs[i]);
  return residual;
}

float* GradientStore::ResidualOf(const Run& run) {
  std::vector<float>& pending = tensors_[run.tensor].pending;
  absl::MutexLock lock(&allocation_mu_);
  if (pending.empty()) pending.assign(job_->tensors()[run.tensor].elements, 0.0f);
  return pending.data() + run.offset;
}

void GradientStore::Encoded(const BucketLayout& layout) {
  for (const Run& run : layout.runs) {
    State& state = tensors_[run.tensor];
    if (state.codec->uses_residual() || !state.from_pending) continue;
    std::memset(state.pending.data() + run.offset, 0, run.length * sizeof(float));
  }
}

void GradientStore::Keep(const BucketLayout& layout) {
  for (const Run& run : layout.runs) {
    const State& state = tensors_[run.tensor];
    if (state.from_pending || state.source == nullptr) continue;  // it is there, or there is nothing
    backend_->Add(ResidualOf(run), state.source + run.offset, run.length, nullptr);
  }
}

absl::Status GradientStore::Returned(const BucketLayout& layout, const Codec& codec, const EncodedFrame& frame) {
  return codec.Return(frame, nullptr, ResidualOf(layout));
}

absl::Status GradientStore::Deferred(const BucketLayout& layout, const Codec& codec, const EncodedFrame& frame,
                                     const std::vector<uint32_t>& positions) {
  if (!codec.uses_residual() || positions.empty()) return absl::OkStatus();
  const std::vector<float*> residual = ResidualOf(layout);
  return codec.Return(frame, &positions, residual);
}

GradientStore::Kept GradientStore::KeptOf(uint32_t tensor) const {
  const State& state = tensors_[tensor];
  return {state.pending, state.second_moment, state.velocity, state.steps};
}

GradientStore::Memory GradientStore::MemoryOf(uint32_t tensor, bool has_pending, uint64_t steps) {
  State& state = tensors_[tensor];
  if (has_pending && state.pending.empty()) state.pending.assign(job_->tensors()[tensor].elements, 0.0f);
  state.steps = steps;
  return {state.pending, state.second_moment, state.velocity};
}

void GradientStore::EndRound() {
  for (State& state : tensors_) {
    state.source = nullptr;
    state.from_pending = false;
    std::vector<float>().swap(state.sanitized);
  }
}

}  // namespace gradwire::client

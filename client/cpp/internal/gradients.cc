// See gradients.h.
#include "client/cpp/internal/gradients.h"

#include <bit>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/frame/run_pieces.h"
#include "common/job/norms.h"

namespace gradwire::client {

GradientStore::GradientStore(const Job* job, std::vector<const Codec*> codecs, std::shared_ptr<TensorMemory> memory)
    : job_(job), memory_(std::move(memory)), tensors_(job->tensors().size()) {
  const bool step = job->spec().push() == v1::PUSH_STEP;
  for (size_t t = 0; t < tensors_.size(); ++t) {
    State& state = tensors_[t];
    const uint64_t elements = job->tensors()[t].elements;
    state.codec = codecs[t];
    if (state.codec == nullptr) continue;
    if (state.codec->uses_residual() || step) state.pending = memory_->Allocate(elements);
    if (step) state.second_moment = memory_->Allocate(elements);
    if (state.codec->velocity()) state.velocity = memory_->Allocate(elements);
  }
}

void GradientStore::TakeIn(uint32_t tensor, const float* gradient, uint64_t round) {
  State& state = tensors_[tensor];
  state.gradient = gradient;
  state.round = round;
  state.taken.reset();
  state.selected.reset();
  if (state.codec == nullptr) return;
  if (SkipsNonFinite(*job_)) Save(&state);
  memory_->FindOutOfGrid(tensor, {gradient, job_->tensors()[tensor].elements}, state.codec->gradient_limit_bits());
  if (job_->spec().push() == v1::PUSH_STEP) ++state.steps;
  Pass(tensor, gradient, /*checked=*/true);
  // Known at once, and then only read, by as many threads as encode the tensor's slices.
  if (memory_->on_host()) Taken(tensor).IgnoreError();
}

void GradientStore::Save(State* state) {
  const auto save = [this](std::span<const float> now, std::span<float>* before) {
    if (now.empty()) return;
    if (before->empty()) {
      absl::MutexLock lock(&allocation_mu_);
      *before = memory_->Allocate(now.size());
    }
    memory_->Copy(now, *before);
  };
  save(state->pending, &state->before.pending);
  save(state->second_moment, &state->before.second_moment);
  save(state->velocity, &state->before.velocity);
  state->before.steps = state->steps;
}

void GradientStore::Undo(const BucketLayout& layout) {
  ForEachTensorPiece(layout, [this](const Run& first, uint64_t elements, uint64_t) {
    State& state = tensors_[first.tensor];
    const auto restore = [&](std::span<const float> before, std::span<float> now) {
      if (now.empty()) return;
      const std::span<float> here = now.subspan(first.offset, elements);
      if (before.empty()) return memory_->Zero(here);  // it was made in this round
      memory_->Copy(before.subspan(first.offset, elements), here);
    };
    Gathered(&state);
    restore(state.before.pending, state.pending);
    restore(state.before.second_moment, state.second_moment);
    restore(state.before.velocity, state.velocity);
    state.steps = state.before.steps;
  });
}

void GradientStore::Pass(uint32_t tensor, const float* values, bool checked) {
  State& state = tensors_[tensor];
  state.from_pending = !state.pending.empty();
  state.source = state.from_pending ? state.pending.data() : values;
  if (!state.from_pending) return;
  Intake intake;
  intake.gradient = {values, state.pending.size()};
  intake.pending = state.pending;
  const auto& step = job_->spec().step();
  // The residual of steps and deltas is their momentum; gradients have theirs on the shards, or in `velocity`.
  if (job_->spec().push() != v1::PUSH_GRADIENT && state.codec->sparse()) intake.decay = step.residual_decay();
  if (job_->spec().push() == v1::PUSH_STEP) {
    intake.second_moment = state.second_moment;
    intake.precondition = kernels::MakePrecondition(step.beta2(), step.epsilon(), state.steps);
  } else if (const std::optional<VelocityRule> rule = state.codec->velocity()) {
    intake.velocity = state.velocity;
    intake.velocity_rule = *rule;
  }
  memory_->TakeIn(intake, checked ? std::optional<uint32_t>(tensor) : std::nullopt);
}

absl::Status GradientStore::Taken(uint32_t tensor) {
  State& state = tensors_[tensor];
  if (state.codec == nullptr) return absl::OkStatus();
  if (!state.taken) {
    const int64_t bad = memory_->FirstOutOfGrid(tensor);
    if (bad < 0) {
      state.taken = absl::OkStatus();
    } else if (job_->spec().nonfinite() == v1::NONFINITE_SANITIZE) {
      state.taken = Sanitize(tensor);
    } else {
      state.taken = Refuse(tensor, static_cast<uint64_t>(bad));
    }
    if (state.taken->ok()) {
      HoldBack(tensor);
    } else {
      state.source = nullptr;
      state.from_pending = false;
      if (job_->spec().push() == v1::PUSH_STEP) --state.steps;
    }
  }
  return *state.taken;
}

void GradientStore::HoldBack(uint32_t tensor) {
  State& state = tensors_[tensor];
  if (state.codec->uses_residual() || !state.from_pending) return;
  {
    absl::MutexLock lock(&allocation_mu_);
    if (!std::exchange(state.gathered, false)) return;
  }
  const SentLimit limit = state.codec->sent_limit();
  memory_->FindOutOfGrid(tensor, state.pending, std::bit_cast<uint32_t>(limit.from));
  if (memory_->FirstOutOfGrid(tensor) < 0) return;
  std::vector<float> sent(state.pending.size());
  memory_->ToHost(state.pending, sent.data());
  std::vector<float> rest(sent.size());
  for (size_t i = 0; i < sent.size(); ++i) {
    const float all = std::exchange(sent[i], limit.Cut(sent[i]));
    if (all != sent[i]) rest[i] = all - sent[i];
  }
  const absl::StatusOr<const float*> held_sent = memory_->Hold(std::move(sent));
  const absl::StatusOr<const float*> held_rest = memory_->Hold(std::move(rest));
  Gathered(&state);
  if (!held_sent.ok() || !held_rest.ok()) return;  // the frame is refused, and comes back
  memory_->Copy({*held_rest, state.pending.size()}, state.pending);
  state.source = *held_sent;
  state.from_pending = false;
}

void GradientStore::Gathered(State* state) {
  absl::MutexLock lock(&allocation_mu_);
  state->gathered = true;
}

absl::Status GradientStore::TakenOf(std::span<const BucketPart> parts) {
  absl::Status taken;
  // Every one is asked: what is refused must not be kept either.
  for (const BucketPart& part : parts) taken.Update(Taken(part.tensor));
  return taken;
}

absl::Status GradientStore::Refuse(uint32_t tensor, uint64_t bad) {
  const State& state = tensors_[tensor];
  float value = 0;
  memory_->ToHost({state.gradient + bad, 1}, &value);
  const bool finite = std::isfinite(value);
  return absl::InvalidArgumentError(absl::StrCat(
      "the gradient of tensor '", job_->tensors()[tensor].name, "' has a ", finite ? "huge" : "non-finite",
      " element in round ", state.round, ": index ", bad, " is ", value,
      finite ? absl::StrFormat(" (magnitudes must be below %.9g where max_workers is %d)",
                               std::bit_cast<float>(state.codec->gradient_limit_bits()), job_->spec().max_workers())
             : "",
      "; this worker contributes nothing to the buckets of this tensor. Look at the loss and the learning rate; with a "
      "scaled loss make the job with nonfinite=\"skip\" (NONFINITE_SKIP), and all workers skip such a step"));
}

absl::Status GradientStore::Sanitize(uint32_t tensor) {
  State& state = tensors_[tensor];
  std::vector<float> values(job_->tensors()[tensor].elements);
  memory_->ToHost({state.gradient, values.size()}, values.data());
  const float limit = std::bit_cast<float>(state.codec->gradient_limit_bits());
  for (float& x : values) {
    if (std::fabs(x) < limit) continue;  // false for NaN
    x = 0.0f;
    sanitized_elements_.fetch_add(1, std::memory_order_relaxed);
  }
  GW_ASSIGN_OR_RETURN(const float* held, memory_->Hold(std::move(values)));
  Pass(tensor, held, /*checked=*/false);
  if (state.selected) Select(tensor, *state.selected);
  return absl::OkStatus();
}

void GradientStore::Select(uint32_t tensor, uint64_t round) {
  State& state = tensors_[tensor];
  if (state.codec == nullptr || !state.codec->selects()) return;
  state.selected = round;
  state.choice = memory_->Select(tensor, state.pending, state.codec->Density(round), *state.codec->selects());
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
    inputs[i].selection = state.choice.selection;
    inputs[i].device_selection = state.choice.on_device;
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
  std::span<float>& pending = tensors_[run.tensor].pending;
  absl::MutexLock lock(&allocation_mu_);
  tensors_[run.tensor].gathered = true;
  if (pending.empty()) pending = memory_->Allocate(job_->tensors()[run.tensor].elements);
  return pending.data() + run.offset;
}

void GradientStore::Encoded(const BucketLayout& layout) {
  ForEachTensorPiece(layout, [this](const Run& first, uint64_t elements, uint64_t) {
    State& state = tensors_[first.tensor];
    if (state.codec->uses_residual() || !state.from_pending) return;
    memory_->Zero(state.pending.subspan(first.offset, elements));
  });
}

void GradientStore::Keep(const BucketLayout& layout) {
  ForEachTensorPiece(layout, [this](const Run& first, uint64_t elements, uint64_t) {
    State& state = tensors_[first.tensor];
    if (state.from_pending) return Gathered(&state);  // it is there
    if (state.source == nullptr) return;
    memory_->Add({state.source + first.offset, elements}, ResidualOf(first));
  });
}

absl::Status GradientStore::Returned(const BucketLayout& layout, const Codec& codec, const EncodedFrame& frame) {
  return memory_->Return(layout, codec, frame, nullptr, ResidualOf(layout));
}

absl::Status GradientStore::Deferred(const BucketLayout& layout, const Codec& codec, const EncodedFrame& frame,
                                     const std::vector<uint32_t>& positions) {
  if (!codec.uses_residual() || positions.empty()) return absl::OkStatus();
  const std::vector<float*> residual = ResidualOf(layout);
  return memory_->Return(layout, codec, frame, &positions, residual);
}

GradientStore::Kept GradientStore::KeptOf(uint32_t tensor) const {
  const State& state = tensors_[tensor];
  return {memory_->View(state.pending), memory_->View(state.second_moment), memory_->View(state.velocity), state.steps};
}

GradientStore::Memory GradientStore::MemoryOf(uint32_t tensor, bool has_pending, uint64_t steps) {
  State& state = tensors_[tensor];
  if (has_pending && state.pending.empty()) state.pending = memory_->Allocate(job_->tensors()[tensor].elements);
  state.steps = steps;
  state.gathered = has_pending;
  return {state.pending, state.second_moment, state.velocity};
}

void GradientStore::EndRound() {
  for (State& state : tensors_) {
    state.gradient = nullptr;
    state.source = nullptr;
    state.from_pending = false;
  }
  memory_->ReleaseHeld();
}

}  // namespace gradwire::client

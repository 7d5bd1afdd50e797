// See gradients.h.
#include "client/cpp/internal/gradients.h"

#include <algorithm>
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

void GradientStore::TakeIn(uint32_t tensor, const GivenGradient& given, uint64_t round) {
  State& state = tensors_[tensor];
  state.gradient = given.values;
  state.round = round;
  state.taken.reset();
  state.selected.reset();
  if (state.codec == nullptr) return;
  state.by_rows = given.rows && state.codec->takes_elements() && job_->spec().push() != v1::PUSH_STEP;
  if (state.by_rows) return TakeInRows(tensor, *given.rows);
  WaitInArray(tensor);
  if (SkipsNonFinite(*job_)) Save(&state);
  if (given.rows) {
    const absl::StatusOr<const float*> held = HeldOf(tensor, *given.rows);
    if (!held.ok()) {
      state.taken = held.status();
      state.source = nullptr;
      state.from_pending = false;
      return;
    }
    state.gradient = *held;
  }
  const float* const gradient = state.gradient;
  memory_->FindOutOfGrid(tensor, {gradient, job_->tensors()[tensor].elements}, state.codec->gradient_limit_bits());
  if (job_->spec().push() == v1::PUSH_STEP) ++state.steps;
  Pass(tensor, gradient, /*checked=*/true);
  // Known at once, and then only read, by as many threads as encode the tensor's slices.
  if (memory_->on_host()) Taken(tensor).IgnoreError();
}

absl::StatusOr<const float*> GradientStore::HeldOf(uint32_t tensor, const RowGradient& gradient) {
  const Tensor& info = job_->tensors()[tensor];
  GW_ASSIGN_OR_RETURN(const CheckedRows rows, CheckedRows::Of(info, gradient));
  return memory_->Hold(DenseOf(info, rows));
}

void GradientStore::TakeInRows(uint32_t tensor, const RowGradient& gradient) {
  State& state = tensors_[tensor];
  const Tensor& info = job_->tensors()[tensor];
  state.source = nullptr;
  state.from_pending = false;
  state.elements.clear();
  WaitByElement(&state);
  if (SkipsNonFinite(*job_)) {
    absl::MutexLock lock(&waiting_mu_);
    state.waiting = Summed(std::move(state.waiting));
    state.before.waiting = state.waiting;
  }
  const absl::StatusOr<CheckedRows> rows = CheckedRows::Of(info, gradient);
  if (!rows.ok()) {
    state.taken = rows.status();
    return;
  }
  const uint32_t limit_bits = state.codec->gradient_limit_bits();
  memory_->FindOutOfGrid(tensor, {rows->values, rows->rows.size() * RowElements(info)}, limit_bits);
  TensorElements elements = ElementsOf(info, *rows);
  if (memory_->FirstOutOfGrid(tensor) >= 0) {
    const float limit = std::bit_cast<float>(limit_bits);
    for (TensorElement& element : elements) {
      if (std::fabs(element.value) < limit) continue;  // false for NaN
      if (job_->spec().nonfinite() != v1::NONFINITE_SANITIZE) {
        state.taken = Refuse(tensor, element.index, element.value);
        return;
      }
      element.value = 0.0f;
      Sanitized();
    }
  }
  state.elements = std::move(elements);
  AddWaiting(&state);
  state.taken = absl::OkStatus();
}

void GradientStore::AddWaiting(State* state) {
  absl::MutexLock lock(&waiting_mu_);
  if (!std::exchange(state->gathered, false) && state->waiting.empty()) return;
  TensorElements waiting = Summed(std::exchange(state->waiting, {}));
  const float decay = DecayOf(*state);
  for (TensorElement& element : waiting) element.value *= decay;
  state->elements = Merged(waiting, state->elements);
  const SentLimit limit = state->codec->sent_limit();
  for (TensorElement& element : state->elements) {
    const float all = std::exchange(element.value, limit.Cut(element.value));
    if (all != element.value) state->waiting.push_back({element.index, all - element.value});
  }
  state->gathered = !state->waiting.empty();
}

void GradientStore::WaitInArray(uint32_t tensor) {
  State& state = tensors_[tensor];
  TensorElements waiting;
  {
    absl::MutexLock lock(&waiting_mu_);
    waiting = std::exchange(state.waiting, {});
  }
  state.elements.clear();
  if (waiting.empty()) return;
  float* const pending = ResidualOf({.tensor = tensor});
  for (const TensorElement& element : waiting) pending[element.index] += element.value;
}

void GradientStore::WaitByElement(State* state) {
  absl::MutexLock lock(&waiting_mu_);
  if (state->pending.empty()) return;
  state->waiting = Merged(ElementsOf(std::span<const float>(state->pending)), Summed(std::move(state->waiting)));
  memory_->Zero(state->pending);
  state->idle = std::exchange(state->pending, {});
}

void GradientStore::Save(State* state) {
  const auto save = [this](std::span<const float> now, std::span<float>* before) {
    if (now.empty()) {
      if (!before->empty()) memory_->Zero(*before);  // what there was waits by element since
      return;
    }
    if (before->empty()) {
      absl::MutexLock lock(&waiting_mu_);
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
  for (const TensorRuns& runs : TensorsIn(layout)) {
    State& state = tensors_[runs.tensor];
    if (!state.by_rows) continue;
    TensorElements before;
    ForEachIn(state.before.waiting, layout, runs,
              [&](size_t i, size_t, uint64_t) { before.push_back(state.before.waiting[i]); });
    absl::MutexLock lock(&waiting_mu_);
    state.gathered = true;
    if (before.empty() && state.waiting.empty()) continue;
    state.waiting = Summed(std::move(state.waiting));
    ForEachIn(state.waiting, layout, runs, [&](size_t i, size_t, uint64_t) { state.waiting[i].value = 0; });
    std::erase_if(state.waiting, [](const TensorElement& element) { return element.value == 0; });
    state.waiting = Merged(state.waiting, before);
  }
  ForEachTensorPiece(layout, [this](const Run& first, uint64_t elements, uint64_t) {
    State& state = tensors_[first.tensor];
    if (state.by_rows) return;
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

float GradientStore::DecayOf(const State& state) const {
  // The residual of steps and deltas is their momentum; gradients have theirs on the shards, or in `velocity`.
  const bool decays = job_->spec().push() != v1::PUSH_GRADIENT && state.codec->sparse();
  return decays ? job_->spec().step().residual_decay() : 1.0f;
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
  intake.decay = DecayOf(state);
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
    absl::MutexLock lock(&waiting_mu_);
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
  absl::MutexLock lock(&waiting_mu_);
  state->gathered = true;
}

absl::Status GradientStore::TakenOf(std::span<const BucketPart> parts) {
  absl::Status taken;
  // Every one is asked: what is refused must not be kept either.
  for (const BucketPart& part : parts) taken.Update(Taken(part.tensor));
  return taken;
}

absl::Status GradientStore::Refuse(uint32_t tensor, uint64_t bad) {
  float value = 0;
  memory_->ToHost({tensors_[tensor].gradient + bad, 1}, &value);
  return Refuse(tensor, bad, value);
}

absl::Status GradientStore::Refuse(uint32_t tensor, uint64_t bad, float value) const {
  const State& state = tensors_[tensor];
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
    Sanitized();
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

bool GradientStore::HasRows(const BucketLayout& layout) const {
  return std::ranges::any_of(TensorsIn(layout),
                             [this](const TensorRuns& runs) { return tensors_[runs.tensor].by_rows; });
}

Elements GradientStore::ElementsOfSlice(const BucketLayout& layout) const {
  Elements found;
  const auto add = [&found](uint64_t position, float value) {
    if (value == 0) return;
    found.positions.push_back(static_cast<uint32_t>(position));
    found.values.push_back(value);
  };
  for (const TensorRuns& runs : TensorsIn(layout)) {
    const State& state = tensors_[runs.tensor];
    if (state.by_rows) {
      ForEachIn(state.elements, layout, runs,
                [&](size_t i, size_t, uint64_t position) { add(position, state.elements[i].value); });
      continue;
    }
    for (size_t run = runs.first; run < runs.last && state.source != nullptr; ++run) {
      const float* const values = state.source + layout.runs[run].offset;
      for (uint32_t i = 0; i < layout.runs[run].length; ++i) add(layout.run_begin[run] + i, values[i]);
    }
  }
  return found;
}

absl::StatusOr<EncodedFrame> GradientStore::Encode(const FrameIdentity& id, const RoundPlan& plan,
                                                   const BucketLayout& layout, Encoder* encoder) {
  if (HasRows(layout)) return encoder->EncodeElements(id, plan, ElementsOfSlice(layout));
  return encoder->Encode(id, plan, InputsOf(layout));
}

std::vector<float*> GradientStore::ResidualOf(const BucketLayout& layout) {
  std::vector<float*> residual(layout.runs.size());
  for (size_t i = 0; i < residual.size(); ++i) residual[i] = ResidualOf(layout.runs[i]);
  return residual;
}

float* GradientStore::ResidualOf(const Run& run) {
  std::span<float>& pending = tensors_[run.tensor].pending;
  absl::MutexLock lock(&waiting_mu_);
  tensors_[run.tensor].gathered = true;
  if (pending.empty()) pending = std::exchange(tensors_[run.tensor].idle, {});
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
  for (const TensorRuns& runs : TensorsIn(layout)) {
    State& state = tensors_[runs.tensor];
    if (!state.by_rows) continue;
    absl::MutexLock lock(&waiting_mu_);
    state.gathered = true;
    ForEachIn(state.elements, layout, runs,
              [&](size_t i, size_t, uint64_t) { state.waiting.push_back(state.elements[i]); });
  }
  ForEachTensorPiece(layout, [this](const Run& first, uint64_t elements, uint64_t) {
    State& state = tensors_[first.tensor];
    if (state.from_pending) return Gathered(&state);  // it is there
    if (state.source == nullptr) return;              // by rows, or nothing was taken in
    memory_->Add({state.source + first.offset, elements}, ResidualOf(first));
  });
}

absl::Status GradientStore::Returned(const BucketLayout& layout, const Codec& codec, const EncodedFrame& frame) {
  if (HasRows(layout)) {
    GW_ASSIGN_OR_RETURN(const Elements carried, codec.Carried(frame));
    ReturnElements(layout, carried);
    return absl::OkStatus();
  }
  return memory_->Return(layout, codec, frame, nullptr, ResidualOf(layout));
}

void GradientStore::ReturnElements(const BucketLayout& layout, const Elements& carried) {
  size_t k = 0;
  for (const TensorRuns& runs : TensorsIn(layout)) {
    State& state = tensors_[runs.tensor];
    TensorElements returned;
    for (size_t run = runs.first; k < carried.positions.size() && carried.positions[k] < layout.run_begin[runs.last];
         ++k) {
      if (carried.positions[k] >= layout.run_begin[run + 1]) run = RunOf(layout, carried.positions[k]);
      returned.push_back({layout.runs[run].offset + carried.positions[k] - layout.run_begin[run], carried.values[k]});
    }
    if (state.by_rows) {
      absl::MutexLock lock(&waiting_mu_);
      state.gathered = true;
      state.waiting.insert(state.waiting.end(), returned.begin(), returned.end());
    } else if (!returned.empty()) {
      float* const pending = ResidualOf({.tensor = runs.tensor});
      for (const TensorElement& element : returned) pending[element.index] += element.value;
    }
  }
}

absl::Status GradientStore::Deferred(const BucketLayout& layout, const Codec& codec, const EncodedFrame& frame,
                                     const std::vector<uint32_t>& positions) {
  if (!codec.uses_residual() || positions.empty()) return absl::OkStatus();
  const std::vector<float*> residual = ResidualOf(layout);
  return memory_->Return(layout, codec, frame, &positions, residual);
}

GradientStore::Kept GradientStore::KeptOf(uint32_t tensor) const {
  const State& state = tensors_[tensor];
  if (!state.waiting.empty()) {
    Kept kept;
    kept.pending.copy.resize(job_->tensors()[tensor].elements);
    for (const TensorElement& element : state.waiting) kept.pending.copy[element.index] += element.value;
    kept.pending.values = kept.pending.copy;
    return kept;
  }
  return {memory_->View(state.pending), memory_->View(state.second_moment), memory_->View(state.velocity), state.steps};
}

GradientStore::Memory GradientStore::MemoryOf(uint32_t tensor, bool has_pending, uint64_t steps) {
  State& state = tensors_[tensor];
  if (has_pending) ResidualOf({.tensor = tensor});
  state.waiting.clear();
  state.steps = steps;
  state.gathered = has_pending;
  return {state.pending, state.second_moment, state.velocity};
}

void GradientStore::EndRound() {
  for (State& state : tensors_) {
    state.gradient = nullptr;
    state.source = nullptr;
    state.from_pending = false;
    state.elements.clear();
  }
  memory_->ReleaseHeld();
}

}  // namespace gradwire::client

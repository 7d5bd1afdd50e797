// The caller's side of a round and the events of the links; the two worker threads are in exchange_threads.cc.
#include "client/cpp/internal/exchange.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/base/failpoint.h"
#include "common/base/status_macros.h"

namespace gradwire::client {
namespace {

constexpr TimeNs kNsPerUs = 1000;

absl::Time DeadlineOf(int64_t timeout_ms) {
  return timeout_ms < 0 ? absl::InfiniteFuture() : absl::Now() + absl::Milliseconds(timeout_ms);
}

}  // namespace

Exchange::Exchange(const ExchangeContext& context, uint64_t version, std::vector<RoundPlan> plans)
    : context_(context),
      shards_(context.layout->shard_count()),
      buckets_(context.layout->bucket_count()),
      threads_(context.job->elements() > kThreadsAbove),
      buckets_of_tensor_(context.job->tensors().size()),
      remaining_(buckets_),
      bad_(context.job->tensors().size()),
      round_(version),
      slices_(buckets_ * shards_),
      ready_(context.job->tensors().size()),
      spin_(threads_ ? 0 : context.spin_us * kNsPerUs) {
  for (uint32_t b = 0; b < buckets_; ++b)
    for (const BucketPart& part : context_.layout->parts(b)) {
      std::vector<uint32_t>& list = buckets_of_tensor_[part.tensor];
      if (list.empty() || list.back() != b) list.push_back(b);
    }
  for (uint32_t i = 0; i < slices_.size(); ++i) {
    slices_[i].encoder = context_.codecs[i]->NewEncoder();
    slices_[i].plan = std::move(plans[i]);
  }
  if (!threads_) return;
  encoder_thread_ = std::thread([this] { EncodeLoop(); });
  apply_thread_ = std::thread([this] { ApplyLoop(); });
}

Exchange::~Exchange() { Stop(absl::CancelledError("the session was closed")); }

void Exchange::Stop(const absl::Status& reason) {
  {
    absl::MutexLock lock(&mu_);
    FailLocked(reason);
    stop_ = true;
    const auto idle = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      return !encoding_ && !writing_replica_ && polling_ == 0;
    };
    mu_.Await(absl::Condition(&idle));
  }
  if (encoder_thread_.joinable()) encoder_thread_.join();
  if (apply_thread_.joinable()) apply_thread_.join();
}

bool Exchange::NeedsParameters() const {
  return context_.pull == PullMode::kParams || context_.pull == PullMode::kParamsBf16;
}

v1::PullKind Exchange::ParametersKind() const {
  return context_.pull == PullMode::kParams ? v1::PULL_PARAMS_F32 : v1::PULL_PARAMS_BF16;
}

// A worker that pulls parameters still reads the update frames of sparse codecs: they name what was deferred.
bool Exchange::NeedsUpdate(uint32_t slice) const { return !NeedsParameters() || context_.codecs[slice]->sparse(); }

std::vector<v1::PullKind> Exchange::Missing(const Slice& slice) const {
  std::vector<v1::PullKind> kinds;
  if (slice.update_missing) kinds.push_back(v1::PULL_UPDATE);
  if (slice.parameters_missing) kinds.push_back(ParametersKind());
  return kinds;
}

void Exchange::ResetRound(uint64_t round) {
  round_ = round;
  settled_ = 0;
  apply_allowed_ = false;
  undecoded_.clear();
  decoded_.clear();
  for (uint32_t b = 0; b < buckets_; ++b) {
    uint32_t tensors = 0;
    uint32_t last = UINT32_MAX;
    for (const BucketPart& part : context_.layout->parts(b)) {
      if (part.tensor != last) ++tensors;
      last = part.tensor;
    }
    remaining_[b] = tensors;
  }
  for (uint32_t i = 0; i < slices_.size(); ++i) {
    Slice& s = slices_[i];
    s.frame.reset();
    s.update = Update();
    s.update_chunks.clear();
    s.parameter_chunks.clear();
    s.abstained = s.sent = s.acked = s.included = s.queued = s.settled = false;
    s.update_missing = NeedsUpdate(i);
    s.parameters_missing = NeedsParameters();
  }
}

absl::Status Exchange::Begin(std::span<const float> learning_rates) {
  const size_t groups = static_cast<size_t>(context_.job->spec().optimizer().groups_size());
  if (learning_rates.size() != groups && learning_rates.size() != 1)
    return absl::InvalidArgumentError(absl::StrCat(learning_rates.size(), " learning rates were given; the job has ",
                                                   groups, " parameter groups: give one for each, or one for all"));
  for (float rate : learning_rates)
    if (!std::isfinite(rate)) return absl::InvalidArgumentError(absl::StrCat("learning rate ", rate, " is not finite"));
  absl::MutexLock lock(&mu_);
  GW_RETURN_IF_ERROR(failed_);
  if (round_open_)
    return absl::FailedPreconditionError(absl::StrCat("round ", round_, " is still open: call EndRound first"));
  learning_rates_.assign(learning_rates.begin(), learning_rates.end());
  learning_rates_.resize(groups, learning_rates[0]);
  round_open_ = true;
  round_error_ = absl::OkStatus();
  ready_.assign(ready_.size(), false);
  ready_order_.clear();
  bad_.assign(bad_.size(), false);
  ResetRound(round_);
  return absl::OkStatus();
}

bool Exchange::IsReady(uint32_t tensor) const {
  absl::MutexLock lock(&mu_);
  return tensor < ready_.size() && ready_[tensor];
}

absl::Status Exchange::Ready(uint32_t tensor, const float* gradient) {
  {
    absl::MutexLock lock(&mu_);
    GW_RETURN_IF_ERROR(NoteReady(tensor, gradient));
  }
  RunTasksInline();
  return absl::OkStatus();
}

absl::Status Exchange::NoteReady(uint32_t tensor, const float* gradient) {
  GW_RETURN_IF_ERROR(failed_);
  if (!round_open_) return absl::FailedPreconditionError("no round is open: call BeginRound first");
  if (tensor >= ready_.size())
    return absl::InvalidArgumentError(
        absl::StrCat("tensor index ", tensor, "; the job has ", ready_.size(), " tensors"));
  const Tensor& info = context_.job->tensors()[tensor];
  if (gradient == nullptr && info.elements > 0)
    return absl::InvalidArgumentError(absl::StrCat("tensor '", info.name, "': the gradient is a null pointer"));
  if (ready_[tensor])
    return absl::FailedPreconditionError(
        absl::StrCat("tensor '", info.name, "' was reported ready twice in round ", round_));
  ready_[tensor] = true;
  ready_order_.push_back(tensor);
  tasks_.push_back({Task::Kind::kIngest, tensor, gradient});
  return absl::OkStatus();
}

absl::Status Exchange::CheckAllReady() const {
  for (size_t t = 0; t < ready_.size(); ++t) {
    const Tensor& info = context_.job->tensors()[t];
    if (!ready_[t] && info.elements > 0)
      return absl::FailedPreconditionError(absl::StrCat("round ", round_, " cannot end: the gradient of tensor '",
                                                        info.name, "' was not reported ready"));
  }
  return absl::OkStatus();
}

absl::Status Exchange::WaitUntil(const absl::Condition& done, absl::Time deadline) {
  const auto over = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !failed_.ok() || done.Eval(); };
  const auto work = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !threads_ && !writing_replica_ && CanApply(); };
  const auto awake = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return over() || work(); };
  for (;;) {
    if (!WaitFor(absl::Condition(&awake), deadline))
      return absl::DeadlineExceededError(
          absl::StrCat("round ", round_, ": ", settled_, " of ", slices_.size(),
                       " updates were applied in time; other workers may be slow or lost. The round stays open: call "
                       "again to go on waiting"));
    if (over()) break;
    ApplyNext();
  }
  if (failed_.ok()) return absl::OkStatus();
  apply_allowed_ = false;
  tasks_.clear();
  const auto idle = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !reading_gradients_ && !writing_replica_; };
  mu_.Await(absl::Condition(&idle));
  return failed_;
}

bool Exchange::WaitFor(const absl::Condition& done, absl::Time deadline) {
  if (done.Eval()) return true;
  const TimeNs begin = clock_.Now();
  if (spin_.budget_ns() > 0) PollFor(spin_.budget_ns(), done);
  const bool in_time = mu_.AwaitWithDeadline(done, deadline);
  spin_.Note(clock_.Now() - begin);
  return in_time;
}

void Exchange::PollFor(TimeNs budget_ns, const absl::Condition& done) {
  ++polling_;
  mu_.Unlock();
  bool can_poll = true;
  const bool ended = SpinBudget::Spin(budget_ns, [&] {
    for (ShardLink* link : context_.links) can_poll = link->Poll() && can_poll;
    absl::MutexLock lock(&mu_);
    return !can_poll || done.Eval();
  });
  if (!ended || !can_poll)
    for (ShardLink* link : context_.links) link->StopPolling();
  mu_.Lock();
  --polling_;
}

absl::Status Exchange::StartAgain() {
  {
    absl::MutexLock lock(&mu_);
    GW_RETURN_IF_ERROR(failed_);
    ResetRound(round_ + 1);
    apply_allowed_ = true;
    for (uint32_t tensor : ready_order_) tasks_.push_back({Task::Kind::kAgain, tensor, nullptr});
  }
  RunTasksInline();
  return absl::OkStatus();
}

absl::Status Exchange::End(int64_t timeout_ms) {
  const absl::Time deadline = DeadlineOf(timeout_ms);
  const TimeNs begin = clock_.Now();
  for (;;) {
    {
      absl::MutexLock lock(&mu_);
      GW_RETURN_IF_ERROR(failed_);
      if (!round_open_) return absl::FailedPreconditionError("no round is open: call BeginRound first");
      GW_RETURN_IF_ERROR(CheckAllReady());
      apply_allowed_ = true;
      const auto all = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return settled_ == slices_.size(); };
      absl::Status waited = WaitUntil(absl::Condition(&all), deadline);
      if (!waited.ok()) {
        counters_.wait_ns += clock_.Now() - begin;
        return waited;
      }
      if (round_ > 0) {
        ++round_;
        round_open_ = false;
        ++counters_.steps;
        counters_.wait_ns += clock_.Now() - begin;
        counters_.sanitized = context_.gradients->sanitized_elements();
        context_.gradients->EndRound();
        return round_error_;
      }
    }
    absl::Status again = StartAgain();
    if (!again.ok()) {
      Fail(again);
      return again;
    }
  }
}

absl::Status Exchange::AwaitSlices(uint32_t bucket, bool Slice::*flag, int64_t timeout_ms) {
  if (bucket >= buckets_)
    return absl::InvalidArgumentError(absl::StrCat("bucket ", bucket, "; the job has ", buckets_, " buckets"));
  absl::MutexLock lock(&mu_);
  GW_RETURN_IF_ERROR(failed_);
  const auto done = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    for (uint32_t shard = 0; shard < shards_; ++shard)
      if (!(slices_[IndexOf(bucket, shard)].*flag)) return false;
    return true;
  };
  return WaitUntil(absl::Condition(&done), DeadlineOf(timeout_ms));
}

absl::Status Exchange::WaitPushed(uint32_t bucket, int64_t timeout_ms) {
  return AwaitSlices(bucket, &Slice::acked, timeout_ms);
}

absl::Status Exchange::WaitApplied(uint32_t bucket, int64_t timeout_ms) {
  {
    absl::MutexLock lock(&mu_);
    if (!round_open_) return absl::FailedPreconditionError("no round is open: call BeginRound first");
    apply_allowed_ = true;
  }
  return AwaitSlices(bucket, &Slice::settled, timeout_ms);
}

uint64_t Exchange::version() const {
  absl::MutexLock lock(&mu_);
  return round_;
}

void Exchange::AddStats(SessionStats* stats) const {
  absl::MutexLock lock(&mu_);
  stats->steps = counters_.steps;
  stats->selected_elements = counters_.selected;
  stats->deferred_elements = counters_.deferred;
  stats->sanitized_elements = counters_.sanitized;
  stats->not_included_frames = counters_.not_included;
  stats->encode_seconds = static_cast<double>(counters_.encode_ns) * 1e-9;
  stats->apply_seconds = static_cast<double>(counters_.apply_ns) * 1e-9;
  stats->wait_seconds = static_cast<double>(counters_.wait_ns) * 1e-9;
}

void Exchange::Fail(const absl::Status& status) {
  absl::MutexLock lock(&mu_);
  FailLocked(status);
}

void Exchange::FailLocked(const absl::Status& status) {
  if (failed_.ok()) failed_ = status;
}

void Exchange::NoteError(const absl::Status& status) {
  if (round_error_.ok()) round_error_ = status;
}

void Exchange::MaybeQueue(uint32_t slice) {
  Slice& s = slices_[slice];
  if (s.queued || !s.sent || !s.acked || s.update_missing || s.parameters_missing) return;
  s.queued = true;
  undecoded_.push_back(slice);
}

void Exchange::OnAck(uint32_t shard, const v1::PushAck& ack) {
  {
    absl::MutexLock lock(&mu_);
    NoteAck(shard, ack);
  }
  RunTasksInline();  // the frame that abstains instead of a refused one
}

void Exchange::NoteAck(uint32_t shard, const v1::PushAck& ack) {
  if (!round_open_ || ack.round() != round_ || ack.bucket() >= buckets_) return;  // of a frame that was settled before
  const uint32_t index = IndexOf(ack.bucket(), shard);
  Slice& s = slices_[index];
  if (s.acked) return;
  if (ack.outcome() == v1::PUSH_REFUSED) {
    const absl::Status refused = context_.links[shard]->Annotate(
        absl::Status(static_cast<absl::StatusCode>(ack.code()), std::string(ack.message())));
    // A worker that may not even abstain has no place in this round, and nobody would end it.
    if (s.abstained) return FailLocked(refused);
    NoteError(refused);
    s.abstained = true;
    tasks_.push_back({Task::Kind::kAbstain, index, nullptr});
    return;
  }
  GW_FAILPOINT("worker.frame.acked");
  s.acked = true;
  s.included = !s.abstained && (ack.outcome() == v1::PUSH_INCLUDED || ack.outcome() == v1::PUSH_DUPLICATE);
  if (!s.abstained && !s.included) ++counters_.not_included;
  MaybeQueue(index);
}

void Exchange::OnAnswer(uint32_t shard, PullAnswer answer) {
  absl::MutexLock lock(&mu_);
  if (answer.version <= round_) return;  // asked for again after a break, and settled by the first answer
  if (!answer.status.ok()) return FailLocked(answer.status);
  if (!round_open_ || answer.bucket >= buckets_ || answer.version != round_ + 1)
    return FailLocked(absl::InternalError(absl::StrCat("shard ", shard, " at ", context_.links[shard]->address(),
                                                       " answered with bucket ", answer.bucket, " version ",
                                                       answer.version, "; version ", round_ + 1, " was asked for")));
  const uint32_t index = IndexOf(answer.bucket, shard);
  Slice& s = slices_[index];
  if (answer.kind == v1::PULL_UPDATE && s.update_missing) {
    s.update_chunks = std::move(answer.chunks);
    s.update_missing = false;
  } else if (NeedsParameters() && answer.kind == ParametersKind() && s.parameters_missing) {
    s.parameter_chunks = std::move(answer.chunks);
    s.parameters_missing = false;
  }
  MaybeQueue(index);
}

std::optional<uint64_t> Exchange::ResumeRound(uint32_t shard) {
  absl::MutexLock lock(&mu_);
  if (!failed_.ok()) return std::nullopt;
  return round_;
}

void Exchange::OnResumed(uint32_t shard) {
  {
    absl::MutexLock lock(&mu_);
    tasks_.push_back({Task::Kind::kResend, shard, nullptr});
  }
  RunTasksInline();
}

void Exchange::OnLost(uint32_t shard, const absl::Status& status) { Fail(status); }

}  // namespace gradwire::client

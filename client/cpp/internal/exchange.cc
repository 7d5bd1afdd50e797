// The caller's side of a round and the events of the links; the two worker threads are in exchange_threads.cc.
#include "client/cpp/internal/exchange.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/internal/deadline.h"
#include "common/base/failpoint.h"
#include "common/base/status_macros.h"
#include "common/job/pull_kinds.h"
#include "common/job/round_mode.h"

namespace gradwire::client {
namespace {

constexpr TimeNs kNsPerUs = 1000;

RoundLedger::Rules RulesOf(const SliceWork& work, const Layout& layout) {
  RoundLedger::Rules rules;
  rules.slices = layout.slices();
  for (uint32_t slice = 0; slice < work.slices(); ++slice) rules.updates.push_back(work.UpdateKind(slice));
  rules.parameters = work.ParametersKind();
  rules.skips = work.skips();
  return rules;
}

}  // namespace

Exchange::Exchange(const ExchangeContext& context, uint64_t version, std::vector<PlanWindow> plans)
    : TaskedExchanger(context.slices, context.links, context.encode_threads, context.coalescing),
      context_(context),
      staleness_(context.slices.job->spec().rounds().staleness()),
      work_(context.slices, std::move(plans)),
      bytes_((staleness_ + 1) * work_.slices()),
      ledger_(RulesOf(work_, layout_), version),
      spin_(threads_ ? 0 : context.spin_us * kNsPerUs) {
  if (threads_) apply_thread_ = std::thread([this] { ApplyLoop(); });
  StartTasks();
}

Exchange::~Exchange() { Stop(absl::CancelledError("the session was closed")); }

void Exchange::Stop(const absl::Status& reason) {
  {
    absl::MutexLock lock(&mu_);
    FailLocked(reason);
    stop_ = true;
    const auto idle = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      return !Encoding() && !writing_replica_ && polling_ == 0 && !agreeing_;
    };
    mu_.Await(absl::Condition(&idle));
  }
  EndTasks();
  if (apply_thread_.joinable()) apply_thread_.join();
}

void Exchange::OpenRound() {
  const uint64_t round = ledger_.next();
  ledger_.Open();
  apply_allowed_ = context_.early_updates && !replacing_;
  countdown_.Reset();
  for (uint32_t slice = 0; slice < work_.slices(); ++slice) BytesOf({round, slice}) = SliceBytes();
}

absl::Status Exchange::CheckMayBegin() const {
  GW_RETURN_IF_ERROR(failed_);
  if (round_open_)
    return absl::FailedPreconditionError(
        absl::StrCat("round ", ledger_.next() - 1, " is still open: call EndRound first"));
  if (catching_)
    return absl::FailedPreconditionError(
        "the shards are ahead, and what this worker needs to go on was asked for by a Drain or a Save that timed out: "
        "call Drain again first");
  return absl::OkStatus();
}

absl::Status Exchange::Begin(std::span<const float> learning_rates) {
  GW_ASSIGN_OR_RETURN(std::vector<float> rates, RatesOf(*context_.slices.job, learning_rates));
  absl::MutexLock lock(&mu_);
  GW_RETURN_IF_ERROR(CheckMayBegin());
  learning_rates_ = std::move(rates);
  round_open_ = true;
  replacing_ = false;
  OpenReady(ledger_.AllAcked());
  OpenRound();
  gradients_round_ = ledger_.next() - 1;
  return absl::OkStatus();
}

absl::Status Exchange::BeginReplacement() {
  FeatureSet asked{Feature::kReplaceParameters};
  if (!context_.slices.gradients->memory().on_host()) asked.Add(Feature::kWorkersOnGpu);
  GW_RETURN_IF_ERROR(context_.slices.job->CheckGoesWith(asked));
  absl::MutexLock lock(&mu_);
  GW_RETURN_IF_ERROR(CheckMayBegin());
  if (!CarriesValues(*context_.slices.job, ledger_.next()))
    return absl::FailedPreconditionError(
        "parameters cannot be replaced before the first step: take one, or join with the new parameters");
  GW_RETURN_IF_ERROR(work_.CheckParametersFinite());  // no other thread is at the replica between two rounds
  round_open_ = replacing_ = true;
  OpenReady(ledger_.AllAcked(), /*all=*/true);
  OpenRound();
  for (uint32_t slice = 0; slice < work_.slices(); ++slice)
    AddTask({Task::Kind::kReplace, 0, nullptr, {ledger_.next() - 1, slice}});
  RunTasksInline();
  return absl::OkStatus();
}

ExchangeTask Exchange::TaskOf(uint32_t tensor, const GivenGradient& gradient) {
  Trace({.stage = v1::TRACE_READY, .round = ledger_.next() - 1, .bucket = tensor});
  return {Task::Kind::kIngest, tensor, gradient, {ledger_.next() - 1, 0}};
}

absl::Status Exchange::WaitUntil(const absl::Condition& done, absl::Time deadline) {
  const auto over = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !failed_.ok() || done.Eval(); };
  const auto work = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !threads_ && !writing_replica_ && CanApply(); };
  const auto awake = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return over() || work(); };
  for (;;) {
    if (!WaitFor(absl::Condition(&awake), deadline))
      return absl::DeadlineExceededError(
          absl::StrCat("round ", ledger_.version(), ": ", ledger_.settled(ledger_.version()), " of ", work_.slices(),
                       " updates were applied in time; other workers may be slow or lost. The round stays open: call "
                       "again to go on waiting"));
    if (over()) break;
    ApplyNext();
  }
  return failed_.ok() ? absl::OkStatus() : Failed();
}

absl::Status Exchange::Failure() {
  const auto unwritten = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !writing_replica_; };
  if (context_.early_updates) mu_.Await(absl::Condition(&unwritten));
  return failed_;
}

absl::Status Exchange::Failed() {
  apply_allowed_ = false;
  tasks_.Clear();
  const auto idle = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !Encoding() && !writing_replica_; };
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
    can_poll = false;  // where one can, the others' threads are awaited as well
    for (FrameLink* link : links_) can_poll |= link->Poll();
    absl::MutexLock lock(&mu_);
    return !can_poll || done.Eval();
  });
  if (!ended || !can_poll)
    for (FrameLink* link : links_) link->StopPolling();
  mu_.Lock();
  --polling_;
}

absl::Status Exchange::StartAgain() {
  absl::MutexLock lock(&mu_);
  GW_RETURN_IF_ERROR(failed_);
  OpenRound();
  apply_allowed_ = true;
  for (uint32_t tensor : ready_.order()) AddTask({Task::Kind::kAgain, tensor, nullptr, {ledger_.next() - 1, 0}});
  RunTasksInline();
  return absl::OkStatus();
}

bool Exchange::MayGoOn() const {
  if (ledger_.Behind() || !Carried()) return AllApplied();  // all that is open; the round prepares the others
  return ledger_.version() + staleness_ >= ledger_.next() && ledger_.AllSent(ledger_.next() - 1) && !CanApply() &&
         !writing_replica_;
}

bool Exchange::Carried() const { return CarriesValues(*context_.slices.job, ledger_.next() - 1); }

bool Exchange::AllApplied() const { return ledger_.AllSettled() && !writing_replica_; }

absl::Status Exchange::ApplyUntil(const absl::Condition& done, absl::Time deadline) {
  apply_allowed_ = true;
  absl::Status waited = WaitUntil(done, deadline);
  apply_allowed_ = false;
  if (!waited.ok()) {
    // Nothing is written to the caller's tensors behind its back.
    const auto idle = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !writing_replica_; };
    mu_.Await(absl::Condition(&idle));
    return waited;
  }
  while (ledger_.version() > ledger_.round()) ledger_.Close();
  return absl::OkStatus();
}

absl::Status Exchange::End(int64_t timeout_ms) {
  const absl::Time deadline = DeadlineOf(timeout_ms);
  const TimeNs begin = clock_.Now();
  for (;;) {
    bool behind = false;
    {
      absl::MutexLock lock(&mu_);
      const TraceSpan span(trace_, {.stage = v1::TRACE_END_ROUND, .round = ledger_.next() - 1});
      if (!failed_.ok()) return Failed();
      if (!round_open_) return absl::FailedPreconditionError("no round is open: call BeginRound first");
      GW_RETURN_IF_ERROR(ready_.CheckAll());
      absl::Status waited = ApplyUntil(absl::Condition(this, &Exchange::MayGoOn), deadline);
      if (!waited.ok()) {
        counters_.wait_ns += clock_.Now() - begin;
        return waited;
      }
      behind = Follows() && ledger_.Behind();
      if (!Follows() && ledger_.AnyGone()) {
        FailLocked(absl::FailedPreconditionError(absl::StrCat(
            "this worker was away for so long that means which the others have are no longer kept (round ",
            ledger_.round() - 1, "); a job whose optimizer is none has no parameters to go on from: join again")));
        return failed_;
      }
      if (!behind && Carried()) return FinishStep(begin);
    }
    if (behind) {
      const absl::Status caught = CatchUp(deadline);
      absl::MutexLock lock(&mu_);
      if (!caught.ok()) {
        counters_.wait_ns += clock_.Now() - begin;
        return caught;
      }
      if (replacing_)
        NoteError(absl::FailedPreconditionError(
            "the others went on without this worker while it replaced the parameters: here are theirs, which may be "
            "the old ones; compare, and replace them again"));
      return FinishStep(begin);
    }
    absl::Status again = StartAgain();
    if (!again.ok()) {
      Fail(again);
      return again;
    }
  }
}

absl::Status Exchange::Drain(int64_t timeout_ms) {
  const absl::Time deadline = DeadlineOf(timeout_ms);
  bool behind = false;
  {
    absl::MutexLock lock(&mu_);
    GW_RETURN_IF_ERROR(failed_);
    if (round_open_)
      return absl::FailedPreconditionError(absl::StrCat("round ", ledger_.next() - 1, " is open: call EndRound first"));
    GW_RETURN_IF_ERROR(ApplyUntil(absl::Condition(this, &Exchange::AllApplied), deadline));
    behind = Follows() && ledger_.Behind();
  }
  if (behind) GW_RETURN_IF_ERROR(CatchUp(deadline));
  absl::MutexLock lock(&mu_);
  return std::exchange(round_error_, absl::OkStatus());
}

absl::Status Exchange::FinishStep(TimeNs begin) {
  round_open_ = false;
  ++counters_.steps;
  counters_.wait_ns += clock_.Now() - begin;
  counters_.sanitized = context_.slices.gradients->sanitized_elements();
  context_.slices.gradients->EndRound();
  return std::exchange(round_error_, absl::OkStatus());
}

absl::Status Exchange::AwaitBucket(uint32_t bucket, bool (RoundLedger::*done)(uint32_t) const, int64_t timeout_ms) {
  GW_RETURN_IF_ERROR(CheckBucket(bucket));
  absl::MutexLock lock(&mu_);
  GW_RETURN_IF_ERROR(failed_);
  const Waiter waiter(this);
  const auto is_done = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return (ledger_.*done)(bucket); };
  return WaitUntil(absl::Condition(&is_done), DeadlineOf(timeout_ms));
}

absl::Status Exchange::WaitPushed(uint32_t bucket, int64_t timeout_ms) {
  return AwaitBucket(bucket, &RoundLedger::BucketAcked, timeout_ms);
}

absl::Status Exchange::WaitApplied(uint32_t bucket, int64_t timeout_ms) {
  {
    absl::MutexLock lock(&mu_);
    if (!round_open_) return absl::FailedPreconditionError("no round is open: call BeginRound first");
    apply_allowed_ = true;
  }
  return AwaitBucket(bucket, &RoundLedger::BucketSettled, timeout_ms);
}

uint64_t Exchange::version() const {
  absl::MutexLock lock(&mu_);
  return ledger_.version();
}

absl::StatusOr<std::vector<PlanWindow>> Exchange::Plans() const {
  absl::MutexLock lock(&mu_);
  GW_RETURN_IF_ERROR(failed_);
  if (round_open_ || ledger_.open())
    return absl::FailedPreconditionError(absl::StrCat("round ", ledger_.round(), " is open: call EndRound, and Drain"));
  std::vector<PlanWindow> plans;
  for (uint32_t slice = 0; slice < work_.slices(); ++slice) plans.push_back(work_.plans(slice));
  return plans;
}

void Exchange::Run(const RoundLedger::Actions& actions) {
  for (Entry entry : actions.abstain) AddTask({Task::Kind::kAbstain, 0, nullptr, entry});
  for (Entry entry : actions.ask) AddTask({Task::Kind::kAsk, 0, nullptr, entry});
  undecoded_.insert(undecoded_.end(), actions.decode.begin(), actions.decode.end());
}

void Exchange::OnAck(uint32_t shard, const v1::PushAck& ack) {
  absl::MutexLock lock(&mu_);
  NoteAck(shard, ack);
  RunTasksInline();  // the frame that abstains instead of a refused one
}

void Exchange::NoteAck(uint32_t shard, const v1::PushAck& ack) {
  const std::optional<uint32_t> slice = SliceOf(ack.bucket(), shard);
  if (!slice) return;
  RoundLedger::Actions actions;
  const Entry entry{ack.round(), *slice};
  Trace(SubjectOf(v1::TRACE_ACKNOWLEDGED, entry.round, entry.slice));
  const std::optional<bool> abstained = ack.has_abstained() ? std::optional(ack.abstained()) : std::nullopt;
  const RoundLedger::AckEffect effect = ledger_.Acked(entry, ack.outcome(), abstained, &actions);
  if (effect == RoundLedger::AckEffect::kNotIncluded) ++counters_.not_included;
  if (effect != RoundLedger::AckEffect::kIgnored && entry.round == gradients_round_)
    coalescing_.Acknowledged(clock_.Now());
  ledger_.Heard(ack.open_round());
  if (effect == RoundLedger::AckEffect::kRefused || effect == RoundLedger::AckEffect::kLost) {
    const absl::Status refused =
        links_[shard]->Annotate(absl::Status(static_cast<absl::StatusCode>(ack.code()), std::string(ack.message())));
    // A worker that may not even abstain has no place in this round, and nobody would end it.
    if (effect == RoundLedger::AckEffect::kLost) return FailLocked(refused);
    NoteError(refused);
  } else if (effect != RoundLedger::AckEffect::kIgnored) {
    GW_FAILPOINT("worker.frame.acked");
  }
  Run(actions);
}

void Exchange::OnAnswer(uint32_t shard, PullAnswer answer) {
  absl::MutexLock lock(&mu_);
  NoteAnswer(shard, std::move(answer));
  RunTasksInline();  // another answer is asked for where this one is gone
}

void Exchange::NoteAnswer(uint32_t shard, PullAnswer answer) {
  // First: it may be the version that this worker has where it knows of all its rounds, but not the parameters.
  if (catching_) return NoteCaught(shard, std::move(answer));
  if (answer.version <= ledger_.round()) return;  // asked for again after a break, and settled by the first answer
  const bool gone = absl::IsOutOfRange(answer.status);
  if (!answer.status.ok() && !gone) return FailLocked(answer.status);
  const auto unexpected = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (ledger_.Behind()) return;  // of an attempt to catch up that was given up
    FailLocked(links_[shard]->Annotate(
        absl::InternalError(absl::StrCat("it answered with bucket ", answer.bucket, " version ", answer.version,
                                         "; version ", ledger_.version() + 1, " was asked for"))));
  };
  const std::optional<uint32_t> slice = SliceOf(answer.bucket, shard);
  if (!slice) return unexpected();
  RoundLedger::Actions actions;
  const Entry entry{answer.version - 1, *slice};
  Trace(SubjectOf(v1::TRACE_RECEIVED, entry.round, entry.slice));
  if (gone) {
    if (ledger_.Gone(entry, answer.kind, &actions) != RoundLedger::AnswerEffect::kTaken) return;
    SliceBytes& bytes = BytesOf(entry);
    (IsOfUpdate(answer.kind) ? bytes.update_gone : bytes.parameters_gone) = true;
    return Run(actions);
  }
  switch (ledger_.Answered(entry, answer.kind, &actions)) {
    case RoundLedger::AnswerEffect::kTaken: {
      SliceBytes& bytes = BytesOf(entry);
      (IsOfUpdate(answer.kind) ? bytes.update_chunks : bytes.parameter_chunks) = std::move(answer.chunks);
      return Run(actions);
    }
    case RoundLedger::AnswerEffect::kRepeated:
      return;
    case RoundLedger::AnswerEffect::kUnexpected:
      return unexpected();
  }
}

std::optional<ResumePoint> Exchange::ResumeAt(uint32_t shard) {
  absl::MutexLock lock(&mu_);
  if (!failed_.ok()) return std::nullopt;
  return ResumePoint{ledger_.round(), ledger_.SeenBuckets(shard)};
}

void Exchange::OnResumed(uint32_t shard, bool behind) {
  absl::MutexLock lock(&mu_);
  ++resumed_;
  if (behind && Follows()) ledger_.Dropped();
  AddTask({Task::Kind::kResend, shard, nullptr, {}});
  RunTasksInline();
}

void Exchange::OnLost(uint32_t shard, const absl::Status& status) { Fail(status); }

}  // namespace gradwire::client

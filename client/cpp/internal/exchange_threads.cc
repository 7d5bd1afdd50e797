// The work of an exchange: encoding what is ready, applying in order of arrival; on threads of its own or, without
// them, on those of the callers.
#include <algorithm>
#include <optional>
#include <utility>

#include "client/cpp/internal/exchange.h"
#include "common/base/failpoint.h"
#include "common/job/norms.h"
#include "common/job/round_mode.h"

namespace gradwire::client {

TaskPlace Exchange::PlaceOf(const Task& task) const {
  switch (task.kind) {
    case Task::Kind::kIngest:
    case Task::Kind::kAgain:
      return {TaskPlace::Rank::kTakeIn, turns_.of_tensor[task.index]};
    case Task::Kind::kEncode:
    case Task::Kind::kReplace:
      return PlaceOfSlice(TaskPlace::Rank::kEncode, task.entry.slice);
    case Task::Kind::kAbstain:
    case Task::Kind::kAsk:
      return PlaceOfSlice(TaskPlace::Rank::kMessage, task.entry.slice);
    case Task::Kind::kResend:
      break;
  }
  return {TaskPlace::Rank::kMessage, 0, task.index};
}

void Exchange::Work(const Task& task) {
  switch (task.kind) {
    case Task::Kind::kIngest:
    case Task::Kind::kAgain:
      ProcessTensor(task);
      return;
    case Task::Kind::kEncode:
      EncodeSlice(task.entry);
      return;
    case Task::Kind::kReplace:
      SendReplacement(task.entry);
      return;
    case Task::Kind::kAbstain:
      SendAgain(task.entry);
      return;
    case Task::Kind::kAsk:
      AskForUpdate(task.entry);
      return;
    case Task::Kind::kResend:
      Resend(task.index);
      return;
  }
}

void Exchange::ProcessTensor(const Task& task) {
  const uint64_t round = task.entry.round;
  const TimeNs begin = clock_.Now();
  std::optional<TraceSpan> span(std::in_place, trace_,
                                TraceSubject{.stage = v1::TRACE_TAKE_IN, .round = round, .bucket = task.index});
  if (task.kind == Task::Kind::kIngest) context_.slices.gradients->TakeIn(task.index, task.gradient, round);
  if (CarriesValues(*context_.slices.job, round)) context_.slices.gradients->Select(task.index, round);
  const TimeNs spent = clock_.Now() - begin;
  span.reset();
  absl::MutexLock lock(&mu_);
  counters_.encode_ns += spent;
  for (uint32_t bucket : countdown_.Complete(task.index))
    for (uint32_t slice = layout_.first_slice(bucket); slice < layout_.first_slice(bucket + 1); ++slice)
      AddTask({Task::Kind::kEncode, 0, nullptr, {round, slice}});
}

void Exchange::EncodeSlice(Entry entry) {
  // What carries no values says something of what is pending: nobody abstains, so every run gets calibrated.
  const TimeNs begin = clock_.Now();
  const bool carries = CarriesValues(*context_.slices.job, entry.round);
  const absl::Status taken = context_.slices.gradients->TakenOf(layout_.parts(At(entry.slice).job_bucket));
  const bool skips = SkipsNonFinite(*context_.slices.job);
  const bool abstains = carries && !taken.ok();
  SliceBytes& bytes = BytesOf(entry);
  absl::Status encoded = taken;
  if (!abstains) {
    std::vector<float> rates;
    {
      absl::MutexLock lock(&mu_);
      rates = learning_rates_;
    }
    encoded = work_.Encode(entry.slice, entry.round, rates, &bytes);
  }
  const bool nonfinite = abstains && skips;
  bytes.nonfinite = nonfinite;
  if (carries && !encoded.ok() && !nonfinite) work_.Keep(entry.slice);
  const TimeNs spent = clock_.Now() - begin;
  {
    absl::MutexLock lock(&mu_);
    counters_.encode_ns += spent;
    if (!taken.ok() && !skips) NoteError(taken);
    if (!abstains && !encoded.ok()) NoteError(encoded);
    if (bytes.frame) counters_.selected += bytes.frame->selected();
  }
  if (!bytes.frame) return SendAbstain(entry);
  GW_FAILPOINT("worker.frame.encoded");
  Send(entry, bytes.frame->chunks);
}

void Exchange::SendAbstain(Entry entry) {
  {
    absl::MutexLock lock(&mu_);
    ledger_.Abstains(entry);
  }
  const SliceBytes& bytes = BytesOf(entry);
  Send(entry, bytes.replacement ? *bytes.replacement : work_.EncodeAbstain(entry.slice, entry.round, bytes.nonfinite));
}

// Where the link has broken the frame is sent again, and asks for it.
void Exchange::AskForUpdate(Entry entry) {
  const uint32_t bucket = At(entry.slice).bucket;
  FrameLink* const link = LinkOf(entry.slice);
  const absl::Status asked = link->RequestPull(v1::PULL_UPDATE, entry.round + 1, bucket, bucket + 1);
  if (!asked.ok() && !link->Mends(asked)) Fail(asked);
}

void Exchange::SendReplacement(Entry entry) {
  BytesOf(entry).replacement = work_.EncodeReplacement(entry.slice, entry.round);
  SendAbstain(entry);
}

void Exchange::Resend(uint32_t shard) {
  std::vector<Entry> entries;
  {
    absl::MutexLock lock(&mu_);
    entries = ledger_.Unanswered(shard);
  }
  for (Entry entry : entries) SendAgain(entry);
}

void Exchange::SendAgain(Entry entry) {
  bool abstained = false;
  {
    absl::MutexLock lock(&mu_);
    if (!failed_.ok() || !ledger_.SendAgain(entry)) return;
    abstained = ledger_.abstained(entry);
  }
  if (abstained) return SendAbstain(entry);
  Send(entry, BytesOf(entry).frame->chunks);
}

void Exchange::Send(Entry entry, std::vector<Bytes> chunks) {
  FrameLink* const link = LinkOf(entry.slice);
  OutgoingFrame frame{std::move(chunks), {}, entry.round, TurnOf(entry.slice)};
  {
    absl::MutexLock lock(&mu_);
    frame.pull = ledger_.Wanted(entry);
  }
  const uint64_t bytes = TotalSize(frame.chunks);
  absl::Status sent;
  {
    const TraceSpan span(trace_, SubjectOf(v1::TRACE_SEND, entry.round, entry.slice, bytes));
    sent = link->SendFrame(std::move(frame));
  }
  GW_FAILPOINT("worker.frame.sent");
  absl::MutexLock lock(&mu_);
  if (!sent.ok() && !link->Mends(sent)) FailLocked(sent);
  RoundLedger::Actions actions;
  ledger_.Sent(entry, &actions);
  Run(actions);
}

void Exchange::ApplyLoop() {
  const auto work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stop_ || CanApply(); };
  absl::MutexLock lock(&mu_);
  for (;;) {
    mu_.Await(absl::Condition(&work));
    if (stop_) return;
    ApplyNext();
  }
}

std::deque<RoundLedger::Entry>::const_iterator Exchange::Applicable() const {
  return std::find_if(decoded_.begin(), decoded_.end(),
                      [this](Entry entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return ledger_.MayApply(entry); });
}

void Exchange::ApplyNext() {
  const bool decode = !undecoded_.empty();
  std::deque<Entry>& queue = decode ? undecoded_ : decoded_;
  const auto next = decode ? queue.cbegin() : Applicable();
  const Entry entry = *next;
  queue.erase(next);
  const bool apply = !decode || (MayWrite() && ledger_.MayApply(entry));
  const bool included = ledger_.included(entry);
  writing_replica_ = true;
  mu_.Unlock();
  SliceBytes& bytes = BytesOf(entry);
  const TimeNs begin = clock_.Now();
  absl::Status status = decode ? work_.Decode(entry.slice, entry.round, &bytes) : absl::OkStatus();
  if (apply && status.ok()) status = work_.Apply(entry.slice, entry.round, included, &bytes);
  const uint64_t deferred = entry.round > 0 ? bytes.update.deferred.size() : 0;
  const bool skipped = bytes.skipped;
  if (apply) bytes = SliceBytes();
  const TimeNs spent = clock_.Now() - begin;
  mu_.Lock();
  counters_.apply_ns += spent;
  writing_replica_ = false;
  if (!status.ok()) return FailLocked(LinkOf(entry.slice)->Annotate(status));
  if (!apply) return decoded_.push_back(entry);
  counters_.deferred += deferred;
  if (skipped && entry.slice == 0) ++counters_.nonfinite;  // alike in all of them
  ledger_.Settled(entry);
}

}  // namespace gradwire::client

// The work of an exchange: encoding in order of readiness, applying in order of arrival; on two threads or, without
// them, on those of the callers.
#include <algorithm>
#include <optional>
#include <utility>

#include "client/cpp/internal/exchange.h"
#include "common/base/failpoint.h"
#include "common/job/norms.h"
#include "common/job/round_mode.h"

namespace gradwire::client {

void Exchange::Work(const Task& task) {
  switch (task.kind) {
    case Task::Kind::kIngest:
    case Task::Kind::kAgain:
      ProcessTensor(task);
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
    case Task::Kind::kReplace:
      SendReplacement(task.index, task.round);
      return;
  }
}

void Exchange::ProcessTensor(const Task& task) {
  const TimeNs begin = clock_.Now();
  std::optional<TraceSpan> span(std::in_place, trace_,
                                TraceSubject{.stage = v1::TRACE_TAKE_IN, .round = task.round, .bucket = task.index});
  if (task.kind == Task::Kind::kIngest) context_.slices.gradients->TakeIn(task.index, task.gradient, task.round);
  if (CarriesValues(*context_.slices.job, task.round)) context_.slices.gradients->Select(task.index, task.round);
  const TimeNs spent = clock_.Now() - begin;
  span.reset();
  {
    absl::MutexLock lock(&mu_);
    counters_.encode_ns += spent;
  }
  for (uint32_t bucket : countdown_.Complete(task.index))
    if (!EncodeBucket(bucket, task.round)) return;
}

bool Exchange::EncodeBucket(uint32_t bucket, uint64_t round) {
  // What carries no values says something of what is pending: nobody abstains, so every run gets calibrated.
  const TimeNs begin = clock_.Now();
  absl::Status taken;
  for (const BucketPart& part : context_.slices.layout->parts(bucket)) {
    const absl::Status of_tensor = context_.slices.gradients->Taken(part.tensor);
    if (taken.ok()) taken = of_tensor;
  }
  const bool abstain = CarriesValues(*context_.slices.job, round) && !taken.ok();
  const bool skips = SkipsNonFinite(*context_.slices.job);
  std::vector<float> rates;
  {
    absl::MutexLock lock(&mu_);
    counters_.encode_ns += clock_.Now() - begin;
    if (!taken.ok() && !skips) NoteError(taken);
    rates = learning_rates_;
  }
  for (uint32_t shard = 0; shard < shards_; ++shard) {
    const Entry entry{round, bucket * shards_ + shard};
    if (abstain && !skips) work_.Keep(entry.slice);
    BytesOf(entry).nonfinite = abstain && skips;
    if (!(abstain ? SendAbstain(entry) : EncodeSlice(entry, rates))) return false;
  }
  return true;
}

bool Exchange::EncodeSlice(Entry entry, std::span<const float> learning_rates) {
  SliceBytes& bytes = BytesOf(entry);
  const TimeNs begin = clock_.Now();
  const absl::Status encoded = work_.Encode(entry.slice, entry.round, learning_rates, &bytes);
  const TimeNs spent = clock_.Now() - begin;
  {
    absl::MutexLock lock(&mu_);
    counters_.encode_ns += spent;
    if (encoded.ok()) counters_.selected += bytes.frame->positions.size();
    if (!encoded.ok()) NoteError(encoded);
  }
  if (!encoded.ok()) {
    if (CarriesValues(*context_.slices.job, entry.round)) work_.Keep(entry.slice);
    return SendAbstain(entry);
  }
  GW_FAILPOINT("worker.frame.encoded");
  return Send(entry, bytes.frame->chunks);
}

bool Exchange::SendAbstain(Entry entry) {
  {
    absl::MutexLock lock(&mu_);
    ledger_.Abstains(entry);
  }
  const SliceBytes& bytes = BytesOf(entry);
  if (bytes.replacement) return Send(entry, *bytes.replacement);
  return Send(entry, work_.EncodeAbstain(entry.slice, entry.round, bytes.nonfinite));
}

// Where the link has broken the frame is sent again, and asks for it.
void Exchange::AskForUpdate(Entry entry) {
  const uint32_t bucket = entry.slice / shards_;
  FrameLink* const link = context_.links[entry.slice % shards_];
  const absl::Status asked = link->RequestPull(v1::PULL_UPDATE, entry.round + 1, bucket, bucket + 1);
  if (!asked.ok() && !link->Mends(asked)) Fail(asked);
}

bool Exchange::SendReplacement(uint32_t bucket, uint64_t round) {
  for (uint32_t shard = 0; shard < shards_; ++shard) {
    const Entry entry{round, bucket * shards_ + shard};
    BytesOf(entry).replacement = work_.EncodeReplacement(entry.slice, round);
    if (!SendAbstain(entry)) return false;
  }
  return true;
}

void Exchange::Resend(uint32_t shard) {
  std::vector<Entry> entries;
  {
    absl::MutexLock lock(&mu_);
    entries = ledger_.Unanswered(shard);
  }
  for (Entry entry : entries)
    if (!SendAgain(entry)) return;
}

bool Exchange::SendAgain(Entry entry) {
  bool abstained = false;
  {
    absl::MutexLock lock(&mu_);
    if (!failed_.ok()) return false;
    if (!ledger_.SendAgain(entry)) return true;
    abstained = ledger_.abstained(entry);
  }
  return abstained ? SendAbstain(entry) : Send(entry, BytesOf(entry).frame->chunks);
}

bool Exchange::Send(Entry entry, const std::vector<Bytes>& chunks) {
  FrameLink* const link = context_.links[entry.slice % shards_];
  std::vector<v1::PullKind> pulls;
  {
    absl::MutexLock lock(&mu_);
    pulls = ledger_.Wanted(entry);
    // Sending may block on a slow peer; the caller's gradients are not read meanwhile.
    reading_gradients_ = false;
  }
  absl::Status sent;
  {
    const TraceSpan span(trace_, SubjectOf(v1::TRACE_SEND, entry.round, entry.slice, TotalSize(chunks)));
    sent = link->SendFrame(chunks, pulls);
  }
  GW_FAILPOINT("worker.frame.sent");
  absl::MutexLock lock(&mu_);
  if (!sent.ok() && !link->Mends(sent)) FailLocked(sent);
  reading_gradients_ = failed_.ok();
  RoundLedger::Actions actions;
  ledger_.Sent(entry, &actions);
  Run(actions);
  return failed_.ok();
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
  const bool included = ledger_.included(entry);
  writing_replica_ = true;
  mu_.Unlock();
  SliceBytes& bytes = BytesOf(entry);
  const TimeNs begin = clock_.Now();
  const absl::Status status =
      decode ? work_.Decode(entry.slice, entry.round, &bytes) : work_.Apply(entry.slice, entry.round, included, &bytes);
  const uint64_t deferred = entry.round > 0 ? bytes.update.deferred.size() : 0;
  const bool skipped = bytes.skipped;
  if (!decode) bytes = SliceBytes();
  const TimeNs spent = clock_.Now() - begin;
  mu_.Lock();
  counters_.apply_ns += spent;
  writing_replica_ = false;
  if (!status.ok()) return FailLocked(context_.links[entry.slice % shards_]->Annotate(status));
  if (decode) return decoded_.push_back(entry);
  counters_.deferred += deferred;
  if (skipped && entry.slice == 0) ++counters_.nonfinite;  // alike in all of them
  ledger_.Settled(entry);
}

}  // namespace gradwire::client

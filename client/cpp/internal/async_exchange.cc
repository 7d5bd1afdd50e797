// See async_exchange.h.
#include "client/cpp/internal/async_exchange.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/internal/deadline.h"
#include "common/base/failpoint.h"
#include "common/base/status_macros.h"
#include "common/codec/update/update.h"
#include "common/wire/frame.h"

namespace gradwire::client {
AsyncExchange::AsyncExchange(const SliceContext& context, std::vector<FrameLink*> links,
                             const std::vector<uint64_t>& versions, std::vector<PlanWindow> plans,
                             uint32_t encode_threads, const Coalescing& coalescing)
    : TaskedExchanger(context, std::move(links), encode_threads, coalescing), context_(context), slices_(plans.size()) {
  for (size_t i = 0; i < slices_.size(); ++i) {
    slices_[i].plans = std::move(plans[i]);
    slices_[i].version = versions[i];
    slices_[i].encoder = context_.gradients->EncoderOf(*context_.codecs[i]);
  }
  StartTasks();
}

AsyncExchange::~AsyncExchange() { Stop(absl::CancelledError("the session was closed")); }

void AsyncExchange::Stop(const absl::Status& reason) {
  {
    absl::MutexLock lock(&mu_);
    FailLocked(reason);
    stop_ = true;
    const auto idle = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !Encoding() && !settling_; };
    mu_.Await(absl::Condition(&idle));
  }
  EndTasks();
}

v1::PullKind AsyncExchange::Kind() const {
  return context_.pull == PullMode::kParamsBf16 ? v1::PULL_PARAMS_BF16 : v1::PULL_PARAMS_F32;
}

absl::Status AsyncExchange::Begin(std::span<const float> learning_rates) {
  GW_ASSIGN_OR_RETURN(std::vector<float> rates, RatesOf(*context_.job, learning_rates));
  absl::MutexLock lock(&mu_);
  GW_RETURN_IF_ERROR(failed_);
  if (round_open_) return absl::FailedPreconditionError("a round is still open: call EndRound first");
  learning_rates_ = std::move(rates);
  round_open_ = true;
  round_error_ = absl::OkStatus();
  OpenReady(/*all_acknowledged=*/true);
  countdown_.Reset();
  for (Slice& slice : slices_) {
    slice.settled = false;
    slice.fate = Fate::kNotSent;
  }
  return absl::OkStatus();
}

absl::Status AsyncExchange::BeginReplacement() { return context_.job->CheckGoesWith({Feature::kReplaceParameters}); }

template <typename Is>
bool AsyncExchange::Every(uint32_t job_bucket, Is is) const {
  return std::all_of(slices_.begin() + layout_.first_slice(job_bucket),
                     slices_.begin() + layout_.first_slice(job_bucket + 1), is);
}

template <typename Done>
absl::Status AsyncExchange::SettleUntil(Done done, absl::Time deadline) {
  const TimeNs begin = clock_.Now();
  const auto complete = [](const Slice& slice) { return slice.Complete(); };
  const auto event = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return !failed_.ok() || done() || std::any_of(slices_.begin(), slices_.end(), complete);
  };
  while (failed_.ok() && !done()) {
    if (!mu_.AwaitWithDeadline(absl::Condition(&event), deadline)) {
      counters_.wait_ns += clock_.Now() - begin;
      return absl::DeadlineExceededError(
          "not every shard has answered in time. The round stays open: call again to go on waiting");
    }
    const auto it = std::find_if(slices_.begin(), slices_.end(), complete);
    if (!failed_.ok() || it == slices_.end()) continue;
    const uint32_t index = static_cast<uint32_t>(it - slices_.begin());
    settling_ = true;
    mu_.Unlock();
    const TimeNs from = clock_.Now();
    const absl::Status settled = Settle(index);
    const TimeNs spent = clock_.Now() - from;
    mu_.Lock();
    RunTasksInline();  // what only calibrated is encoded again
    settling_ = false;
    counters_.apply_ns += spent;
    if (!settled.ok()) FailLocked(LinkOf(index)->Annotate(settled));
  }
  counters_.wait_ns += clock_.Now() - begin;
  if (failed_.ok()) return absl::OkStatus();
  // The caller's memory is not used any more when it is told.
  const auto idle = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !Encoding() && !settling_; };
  mu_.Await(absl::Condition(&idle));
  return failed_;
}

absl::Status AsyncExchange::End(int64_t timeout_ms) {
  absl::MutexLock lock(&mu_);
  if (failed_.ok() && !round_open_) return absl::FailedPreconditionError("no round is open: call BeginRound first");
  if (failed_.ok()) GW_RETURN_IF_ERROR(ready_.CheckAll());
  const auto all = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return std::all_of(slices_.begin(), slices_.end(), [](const Slice& slice) { return slice.settled; });
  };
  GW_RETURN_IF_ERROR(SettleUntil(all, DeadlineOf(timeout_ms)));
  round_open_ = false;
  ++counters_.steps;
  counters_.sanitized = context_.gradients->sanitized_elements();
  context_.gradients->EndRound();
  return round_error_;
}

absl::Status AsyncExchange::Drain(int64_t /*timeout_ms*/) {
  absl::MutexLock lock(&mu_);
  GW_RETURN_IF_ERROR(failed_);
  return round_open_ ? absl::FailedPreconditionError("a round is open: call EndRound first") : absl::OkStatus();
}

absl::Status AsyncExchange::WaitPushed(uint32_t bucket, int64_t timeout_ms) {
  GW_RETURN_IF_ERROR(CheckBucket(bucket));
  absl::MutexLock lock(&mu_);
  GW_RETURN_IF_ERROR(failed_);
  const Waiter waiter(this);
  const auto pushed = [this, bucket]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return !failed_.ok() || Every(bucket, [](const Slice& s) { return s.settled || s.fate != Fate::kNotSent; });
  };
  if (!mu_.AwaitWithDeadline(absl::Condition(&pushed), DeadlineOf(timeout_ms)))
    return absl::DeadlineExceededError(absl::StrCat("bucket ", bucket, " was not acknowledged in time"));
  return failed_;
}

absl::Status AsyncExchange::WaitApplied(uint32_t bucket, int64_t timeout_ms) {
  GW_RETURN_IF_ERROR(CheckBucket(bucket));
  absl::MutexLock lock(&mu_);
  GW_RETURN_IF_ERROR(failed_);
  if (!round_open_) return absl::FailedPreconditionError("no round is open: call BeginRound first");
  const Waiter waiter(this);
  const auto applied = [this, bucket]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return Every(bucket, [](const Slice& s) { return s.settled; });
  };
  return SettleUntil(applied, DeadlineOf(timeout_ms));
}

absl::StatusOr<std::vector<uint32_t>> AsyncExchange::DeferredOf(uint32_t index) {
  Slice& slice = slices_[index];
  const Codec& codec = *context_.codecs[index];
  if (!codec.defers()) return std::vector<uint32_t>();
  if (slice.decoder == nullptr) slice.decoder = codec.NewAccumulator();
  GW_ASSIGN_OR_RETURN(const std::vector<wire::Chunk> chunks, wire::ParseFrame(slice.frame->chunks));
  slice.decoder->Open(slice.version, slice.frame->plan);
  for (const wire::Chunk& chunk : chunks)
    for (const wire::Segment& segment : chunk.segments) GW_RETURN_IF_ERROR(slice.decoder->Add(segment));
  FrameIdentity id;
  id.shard = static_cast<uint16_t>(At(index).shard);
  id.bucket = At(index).bucket;
  id.round = slice.version;
  const std::vector<float> rates(static_cast<size_t>(context_.job->spec().optimizer().groups_size()));
  id.learning_rates = rates;
  GW_ASSIGN_OR_RETURN(const UpdateFrame alone, slice.decoder->Finish(id, 1));
  if (alone.stats.deferred == 0) return std::vector<uint32_t>();
  GW_ASSIGN_OR_RETURN(Update update, DecodeUpdate(alone.chunks, *context_.job, At(index), slice.frame->plan));
  return std::move(update.deferred);
}

absl::Status AsyncExchange::Settle(uint32_t index) {
  Slice& slice = slices_[index];
  const BucketLayout& layout = At(index);
  const Codec& codec = *context_.codecs[index];
  const bool calibrated = slice.frame.has_value() && slice.version == 0;  // it carried no values
  uint64_t deferred = 0;
  if (slice.fate == Fate::kIncluded && !calibrated) {
    GW_ASSIGN_OR_RETURN(const std::vector<uint32_t> positions, DeferredOf(index));
    deferred = positions.size();
    GW_RETURN_IF_ERROR(context_.gradients->Deferred(layout, codec, *slice.frame, positions));
  } else if (slice.frame.has_value() && !calibrated) {
    GW_RETURN_IF_ERROR(context_.gradients->Returned(layout, codec, *slice.frame));
  }
  std::optional<TraceSpan> span(std::in_place, trace_, SubjectOf(v1::TRACE_STEP, slices_[index].version, index));
  GW_ASSIGN_OR_RETURN(PlanWindow plans, context_.replica->Load(layout, slice.chunks, slice.arrived));
  span.reset();
  GW_FAILPOINT("worker.update.applied");
  absl::MutexLock lock(&mu_);
  slice.plans = std::move(plans);
  slice.version = slice.arrived;
  slice.frame.reset();
  slice.chunks.clear();
  counters_.deferred += deferred;
  if (calibrated && slice.fate != Fate::kRefused) {
    slice.fate = Fate::kNotSent;
    AddTask({Task::Kind::kEncode, index, nullptr});
  } else {
    slice.settled = true;
  }
  return absl::OkStatus();
}

uint64_t AsyncExchange::version() const {
  absl::MutexLock lock(&mu_);
  uint64_t version = UINT64_MAX;
  for (const Slice& slice : slices_) version = std::min(version, slice.version);
  return version;
}

absl::StatusOr<std::vector<PlanWindow>> AsyncExchange::Plans() const {
  absl::MutexLock lock(&mu_);
  GW_RETURN_IF_ERROR(failed_);
  if (round_open_) return absl::FailedPreconditionError("a round is open: call EndRound first");
  std::vector<PlanWindow> plans;
  for (const Slice& slice : slices_) plans.push_back(slice.plans);
  return plans;
}

void AsyncExchange::OnAck(uint32_t shard, const v1::PushAck& ack) {
  absl::MutexLock lock(&mu_);
  NoteAck(shard, ack);
  RunTasksInline();  // the pull instead of a refused push
}

void AsyncExchange::NoteAck(uint32_t shard, const v1::PushAck& ack) {
  const std::optional<uint32_t> of = SliceOf(ack.bucket(), shard);
  if (!of) return;
  const uint32_t index = *of;
  Slice& slice = slices_[index];
  if (!slice.unanswered || ack.round() != slice.version) return;  // answered before
  Trace(SubjectOf(v1::TRACE_ACKNOWLEDGED, slice.version, index));
  slice.unanswered = false;
  coalescing_.Acknowledged(clock_.Now());
  switch (ack.outcome()) {
    case v1::PUSH_INCLUDED:
    case v1::PUSH_DUPLICATE:
      slice.fate = Fate::kIncluded;
      NoteLeast(&slice, std::max(ack.made(), slice.version + 1));
      GW_FAILPOINT("worker.frame.acked");
      return;
    case v1::PUSH_NOT_INCLUDED:
      slice.fate = Fate::kNotIncluded;
      NoteLeast(&slice, std::max(ack.made(), slice.version + 1));
      ++counters_.not_included;
      return;
    default:
      break;
  }
  const absl::Status refused =
      links_[shard]->Annotate(absl::Status(static_cast<absl::StatusCode>(ack.code()), std::string(ack.message())));
  // Whether it was merged is not known: it can neither be taken back nor forgotten.
  if (absl::IsDataLoss(refused)) return FailLocked(refused);
  NoteError(refused);
  slice.fate = Fate::kRefused;
  slice.least = slice.version;
  slice.chunks.clear();
  AddTask({Task::Kind::kPull, index, nullptr});  // what was asked for with the frame is not answered
}

void AsyncExchange::NoteLeast(Slice* slice, uint64_t least) {
  slice->least = least;
  if (slice->chunks.empty()) return;
  if (slice->arrived >= least) {
    slice->waiting = false;
  } else {
    slice->chunks.clear();  // an answer to what was asked before; another one follows
  }
}

void AsyncExchange::OnAnswer(uint32_t shard, PullAnswer answer) {
  absl::MutexLock lock(&mu_);
  if (!answer.status.ok()) return FailLocked(answer.status);
  const std::optional<uint32_t> index = SliceOf(answer.bucket, shard);
  if (!index || answer.kind != Kind() || answer.chunks.empty()) return;
  Slice& slice = slices_[*index];
  if (!slice.waiting) return;  // asked for again after a break
  const uint64_t version = answer.chunks[0].header.round;
  if (version < slice.least || (!slice.chunks.empty() && version <= slice.arrived)) return;  // the same
  Trace(SubjectOf(v1::TRACE_RECEIVED, slice.version, *index));
  slice.arrived = version;
  slice.chunks = std::move(answer.chunks);
  // The acknowledgement may come later, and says how new they have to be.
  if (!slice.unanswered) slice.waiting = false;
}

std::optional<ResumePoint> AsyncExchange::ResumeAt(uint32_t shard) {
  absl::MutexLock lock(&mu_);
  if (!failed_.ok()) return std::nullopt;
  ResumePoint point;
  for (const uint32_t index : layout_.slices_of(shard)) {
    const Slice& slice = slices_[index];
    point.versions.push_back(slice.Complete() ? slice.arrived : slice.version);
  }
  return point;
}

void AsyncExchange::OnResumed(uint32_t shard, bool /*behind*/) {
  absl::MutexLock lock(&mu_);
  AddTask({Task::Kind::kResend, shard, nullptr});
  RunTasksInline();
}

void AsyncExchange::OnLost(uint32_t /*shard*/, const absl::Status& status) {
  absl::MutexLock lock(&mu_);
  FailLocked(status);
}

TaskPlace AsyncExchange::PlaceOf(const Task& task) const {
  switch (task.kind) {
    case Task::Kind::kTensor:
      return {TaskPlace::Rank::kTakeIn, turns_.of_tensor[task.index]};
    case Task::Kind::kEncode:
      return PlaceOfSlice(TaskPlace::Rank::kEncode, task.index);
    case Task::Kind::kPull:
      return PlaceOfSlice(TaskPlace::Rank::kMessage, task.index);
    case Task::Kind::kResend:
      break;
  }
  return {TaskPlace::Rank::kMessage, 0, task.index};
}

void AsyncExchange::Work(const Task& task) {
  switch (task.kind) {
    case Task::Kind::kTensor:
      ProcessTensor(task);
      return;
    case Task::Kind::kEncode:
      Encode(task.index);
      return;
    case Task::Kind::kPull:
      if (slices_[task.index].version == 0) context_.gradients->Keep(At(task.index));  // the frame had no values
      Pull(task.index);
      return;
    case Task::Kind::kResend:
      Resend(task.index);
      return;
  }
}

void AsyncExchange::ProcessTensor(const Task& task) {
  const TimeNs begin = clock_.Now();
  // Schedules that count rounds count versions; version 0 only calibrates.
  const uint64_t round = std::max<uint64_t>(version(), 1);
  std::optional<TraceSpan> span(std::in_place, trace_,
                                TraceSubject{.stage = v1::TRACE_TAKE_IN, .round = round, .bucket = task.index});
  context_.gradients->TakeIn(task.index, task.gradient, round);
  context_.gradients->Select(task.index, round);
  span.reset();
  const TimeNs spent = clock_.Now() - begin;
  absl::MutexLock lock(&mu_);
  counters_.encode_ns += spent;
  for (uint32_t bucket : countdown_.Complete(task.index))
    for (uint32_t slice = layout_.first_slice(bucket); slice < layout_.first_slice(bucket + 1); ++slice)
      AddTask({Task::Kind::kEncode, slice, nullptr});
}

void AsyncExchange::Encode(uint32_t index) {
  Slice& slice = slices_[index];
  const TimeNs begin = clock_.Now();
  const absl::Status taken = context_.gradients->TakenOf(layout_.parts(At(index).job_bucket));
  const bool bad = !taken.ok();
  FrameIdentity id;
  id.shard = static_cast<uint16_t>(At(index).shard);
  id.bucket = At(index).bucket;
  id.round = slice.version;
  id.incarnation = context_.incarnation;
  id.draws = context_.draws;
  std::vector<float> rates;
  {
    absl::MutexLock lock(&mu_);
    if (!failed_.ok()) return;
    rates = learning_rates_;
  }
  id.learning_rates = rates;
  absl::StatusOr<EncodedFrame> frame = absl::CancelledError();
  std::optional<TraceSpan> span(std::in_place, trace_, SubjectOf(v1::TRACE_ENCODE, slices_[index].version, index));
  if (!bad) frame = context_.gradients->Encode(id, slice.plans.newest(), At(index), slice.encoder);
  if (!frame.ok()) {
    context_.gradients->Keep(At(index));
  } else if (slice.version > 0) {
    context_.gradients->Encoded(At(index));
  }
  span.reset();
  const TimeNs spent = clock_.Now() - begin;
  {
    absl::MutexLock lock(&mu_);
    counters_.encode_ns += spent;
    slice.waiting = true;
    slice.least = slice.version;
    if (frame.ok()) {
      counters_.selected += frame->selected();
      slice.frame = *std::move(frame);
      slice.unanswered = true;
    } else {
      NoteError(bad ? taken : frame.status());
    }
  }
  if (!slice.frame) return Pull(index);  // nobody waits for what it does not contribute
  GW_FAILPOINT("worker.frame.encoded");
  SendFrame(index);
}

void AsyncExchange::SendFrame(uint32_t index) {
  OutgoingFrame frame{{}, {Kind()}, 0, TurnOf(index)};  // a step's frames have no rounds in common
  {
    absl::MutexLock lock(&mu_);
    slices_[index].sending = true;
    frame.chunks = slices_[index].frame->chunks;
  }
  const uint64_t bytes = TotalSize(frame.chunks);
  absl::Status sent;
  {
    const TraceSpan span(trace_, SubjectOf(v1::TRACE_SEND, slices_[index].version, index, bytes));
    sent = LinkOf(index)->SendFrame(std::move(frame));
  }
  GW_FAILPOINT("worker.frame.sent");
  Sent(index, sent);
}

void AsyncExchange::Pull(uint32_t index) {
  uint64_t least = 0;
  {
    absl::MutexLock lock(&mu_);
    least = slices_[index].least;
  }
  Sent(index, LinkOf(index)->RequestPull(Kind(), least, At(index).bucket, At(index).bucket + 1));
}

void AsyncExchange::Resend(uint32_t shard) {
  for (const uint32_t index : layout_.slices_of(shard)) {
    Slice& slice = slices_[index];
    bool again = false;
    bool waiting = false;
    {
      // What was acknowledged may be lost as long as no parameters have come that it is in. The same bytes once more:
      // the shard knows by digest what it has merged.
      absl::MutexLock lock(&mu_);
      waiting = slice.waiting;
      if (waiting) slice.chunks.clear();  // of a server that may have lost them
      again = waiting && slice.frame.has_value() && slice.fate != Fate::kRefused;
      if (again) {
        slice.unanswered = true;
        slice.fate = Fate::kNotSent;
      }
    }
    if (again) {
      SendFrame(index);
    } else if (waiting) {
      Pull(index);
    }
  }
}

void AsyncExchange::Sent(uint32_t index, const absl::Status& status) {
  absl::MutexLock lock(&mu_);
  slices_[index].sending = false;
  if (!status.ok() && !FrameLink::Mends(status)) FailLocked(status);
}

}  // namespace gradwire::client

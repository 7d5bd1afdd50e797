// The work of an exchange: encoding in order of readiness, applying in order of arrival; on two threads or, without
// them, on those of the callers.
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/internal/exchange.h"
#include "common/base/failpoint.h"
#include "common/base/status_macros.h"
#include "common/wire/frame.h"

namespace gradwire::client {

void Exchange::EncodeLoop() {
  const auto work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stop_ || !tasks_.empty(); };
  absl::MutexLock lock(&mu_);
  for (;;) {
    mu_.Await(absl::Condition(&work));
    if (stop_) return;
    RunTask();
  }
}

void Exchange::RunTasksInline() {
  absl::MutexLock lock(&mu_);
  if (threads_ || encoding_) return;
  while (!stop_ && !tasks_.empty()) RunTask();
}

void Exchange::RunTask() {
  const Task task = tasks_.front();
  tasks_.pop_front();
  const uint64_t round = round_;
  encoding_ = reading_gradients_ = true;
  mu_.Unlock();
  if (task.kind == Task::Kind::kAbstain) {
    SendAbstain(task.index, round);
  } else if (task.kind == Task::Kind::kResend) {
    Resend(task.index, round);
  } else {
    ProcessTensor(task, round);
  }
  mu_.Lock();
  encoding_ = reading_gradients_ = false;
}

void Exchange::ProcessTensor(const Task& task, uint64_t round) {
  const TimeNs begin = clock_.Now();
  if (task.kind == Task::Kind::kIngest) {
    absl::Status taken = context_.gradients->Ingest(task.index, task.gradient, round);
    if (!taken.ok()) {
      bad_[task.index] = true;
      absl::MutexLock lock(&mu_);
      NoteError(taken);
    }
  }
  if (!bad_[task.index] && round > 0) context_.gradients->Select(task.index, round);
  const TimeNs spent = clock_.Now() - begin;
  {
    absl::MutexLock lock(&mu_);
    counters_.encode_ns += spent;
  }
  for (uint32_t bucket : buckets_of_tensor_[task.index])
    if (--remaining_[bucket] == 0 && !EncodeBucket(bucket, round)) return;
}

bool Exchange::EncodeBucket(uint32_t bucket, uint64_t round) {
  // Round 0 carries no values, only the ranges of what is pending: nobody abstains, so every run gets calibrated.
  bool abstain = false;
  for (const BucketPart& part : context_.layout->parts(bucket)) abstain = abstain || (round > 0 && bad_[part.tensor]);
  std::vector<float> rates;
  {
    absl::MutexLock lock(&mu_);
    rates = learning_rates_;
  }
  for (uint32_t shard = 0; shard < shards_; ++shard) {
    const uint32_t slice = IndexOf(bucket, shard);
    if (!(abstain ? SendAbstain(slice, round) : EncodeSlice(slice, round, rates))) return false;
  }
  return true;
}

bool Exchange::EncodeSlice(uint32_t slice, uint64_t round, std::span<const float> learning_rates) {
  Slice& s = slices_[slice];
  const TimeNs begin = clock_.Now();
  FrameIdentity id;
  id.shard = static_cast<uint16_t>(slice % shards_);
  id.bucket = slice / shards_;
  id.round = round;
  id.incarnation = context_.incarnation;
  id.learning_rates = learning_rates;
  const std::vector<RunInput> inputs = context_.gradients->InputsOf(LayoutOf(slice));
  absl::StatusOr<EncodedFrame> frame = s.encoder->Encode(id, s.plan, inputs);
  const TimeNs spent = clock_.Now() - begin;
  {
    absl::MutexLock lock(&mu_);
    counters_.encode_ns += spent;
    if (frame.ok()) counters_.selected += frame->positions.size();
    if (!frame.ok()) NoteError(frame.status());
  }
  if (!frame.ok()) return SendAbstain(slice, round);
  s.frame = *std::move(frame);
  GW_FAILPOINT("worker.frame.encoded");
  return Send(slice, s.frame->chunks);
}

bool Exchange::SendAbstain(uint32_t slice, uint64_t round) {
  wire::FrameHeader header;
  header.kind = wire::FrameKind::kPush;
  header.flags = wire::kAbstain;
  header.bucket = slice / shards_;
  header.shard = static_cast<uint16_t>(slice % shards_);
  header.round = round;
  header.shape_digest = LayoutOf(slice).shape_digest;
  header.incarnation = context_.incarnation;
  header.plan_digest = slices_[slice].plan.Digest();
  {
    absl::MutexLock lock(&mu_);
    slices_[slice].abstained = true;
  }
  return Send(slice, wire::FrameWriter(header).Finish());
}

void Exchange::Resend(uint32_t shard, uint64_t round) {
  for (uint32_t b = 0; b < buckets_; ++b) {
    const uint32_t slice = IndexOf(b, shard);
    Slice& s = slices_[slice];
    {
      absl::MutexLock lock(&mu_);
      if (!round_open_ || !failed_.ok()) return;
      if (s.queued || !s.sent) continue;  // settled, or encoded and sent in its turn
      s.acked = s.included = false;       // a shard that forgot the frame may judge it anew
    }
    if (!(s.abstained || !s.frame ? SendAbstain(slice, round) : Send(slice, s.frame->chunks))) return;
  }
}

bool Exchange::Send(uint32_t slice, const std::vector<Bytes>& chunks) {
  std::vector<v1::PullKind> pulls;
  {
    absl::MutexLock lock(&mu_);
    pulls = Missing(slices_[slice]);
    // Sending may block on a slow peer; the caller's gradients are not read meanwhile.
    reading_gradients_ = false;
  }
  const absl::Status sent = context_.links[slice % shards_]->SendFrame(chunks, pulls);
  GW_FAILPOINT("worker.frame.sent");
  absl::MutexLock lock(&mu_);
  if (!sent.ok() && !context_.links[slice % shards_]->Mends(sent)) FailLocked(sent);
  reading_gradients_ = failed_.ok();
  slices_[slice].sent = true;
  MaybeQueue(slice);
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

void Exchange::ApplyNext() {
  const bool decode = !undecoded_.empty();
  std::deque<uint32_t>& queue = decode ? undecoded_ : decoded_;
  const uint32_t slice = queue.front();
  queue.pop_front();
  const uint64_t round = round_;
  writing_replica_ = true;
  mu_.Unlock();
  const TimeNs begin = clock_.Now();
  const absl::Status status = decode ? Decode(slice, round) : Apply(slice, round);
  const TimeNs spent = clock_.Now() - begin;
  mu_.Lock();
  counters_.apply_ns += spent;
  writing_replica_ = false;
  if (!status.ok()) {
    FailLocked(context_.links[slice % shards_]->Annotate(status));
  } else if (decode) {
    decoded_.push_back(slice);
  } else {
    slices_[slice].settled = true;
    ++settled_;
  }
}

absl::Status Exchange::Decode(uint32_t slice, uint64_t round) {
  Slice& s = slices_[slice];
  if (!NeedsUpdate(slice)) return absl::OkStatus();
  GW_ASSIGN_OR_RETURN(s.update, DecodeUpdate(s.update_chunks, *context_.job, LayoutOf(slice), s.plan));
  if (s.update.round != round)
    return absl::InvalidArgumentError(absl::StrCat("bucket ", slice / shards_, ": an update frame of round ",
                                                   s.update.round, " came where round ", round, " was expected"));
  return absl::OkStatus();
}

absl::Status Exchange::Apply(uint32_t slice, uint64_t round) {
  Slice& s = slices_[slice];
  const BucketLayout& layout = LayoutOf(slice);
  RoundPlan next = std::move(s.update.next);
  switch (context_.pull) {
    case PullMode::kUpdate:
      GW_RETURN_IF_ERROR(context_.replica->Apply(layout, s.update));
      break;
    case PullMode::kMean:
      if (round > 0) context_.replica->WriteMean(layout, s.update);
      break;
    case PullMode::kParams:
    case PullMode::kParamsBf16: {
      GW_ASSIGN_OR_RETURN(next, context_.replica->Load(layout, s.parameter_chunks, round + 1));
      break;
    }
  }
  GW_FAILPOINT("worker.update.applied");
  GW_RETURN_IF_ERROR(Settle(slice, round));
  s.plan = std::move(next);
  s.frame.reset();
  s.update_chunks.clear();
  s.parameter_chunks.clear();
  return absl::OkStatus();
}

absl::Status Exchange::Settle(uint32_t slice, uint64_t round) {
  if (round == 0) return absl::OkStatus();  // carried no values
  Slice& s = slices_[slice];
  const BucketLayout& layout = LayoutOf(slice);
  const Codec& codec = *context_.codecs[slice];
  bool included = false;
  {
    absl::MutexLock lock(&mu_);
    included = s.included;
    counters_.deferred += s.update.deferred.size();
  }
  if (!included) return context_.gradients->Returned(layout, codec, s.frame.has_value() ? &*s.frame : nullptr);
  context_.gradients->Included(layout);
  return context_.gradients->Deferred(layout, codec, *s.frame, s.update.deferred);
}

}  // namespace gradwire::client

// See desk.h.
#include "server/desk/desk.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/failpoint.h"
#include "common/base/out_of_memory.h"
#include "common/base/status_macros.h"
#include "common/job/pull_kinds.h"
#include "common/wire/frame.h"

namespace gradwire {
namespace {

// The control message of one chunk of an answer, or of why there is none.
std::string ControlOf(const Delivery& delivery, bool first, bool last) {
  const auto fill = [&](auto& control) {
    control.set_bucket(delivery.bucket);
    control.set_kind(delivery.to.kind);
    control.set_last(last);
    if (delivery.frame != nullptr) return;
    control.set_code(static_cast<int>(delivery.status.code()));
    control.set_message(std::string(delivery.status.message()));
  };
  if (delivery.to.pushed) {
    v1::PushAck ack;
    fill(ack);
    ack.set_round(*delivery.to.pushed);
    if (first) {
      ack.set_outcome(delivery.outcome);
      ack.set_open_round(delivery.open_round);
      ack.set_made(delivery.made);
      ack.set_abstained(delivery.abstained);
    }
    return ack.SerializeAsString();
  }
  v1::PullMessage message;
  fill(message);
  message.set_version(delivery.to.version);
  return message.SerializeAsString();
}

}  // namespace

absl::Status Desk::Pull(MemberId member, const v1::PullRequest& request, const std::shared_ptr<Outbox>& out) {
  const std::string& name = parts_.job.spec().name();
  {
    absl::MutexLock lock(&parts_.mu);
    if (!parts_.shut.ok()) return parts_.shut;
    if (parts_.rounds->membership().Get(member) == nullptr) {
      return absl::NotFoundError(absl::StrFormat(
          "job '%s': the worker is no longer a member (it left, or its lease ended): join again", name));
    }
  }
  GW_RETURN_IF_ERROR(answers_.CheckKind(request.kind()));
  if (request.bucket_begin() >= request.bucket_end() || request.bucket_end() > parts_.buckets.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("job '%s': bucket range [%d, %d) is not within the %d buckets of this job", name,
                        request.bucket_begin(), request.bucket_end(), parts_.buckets.size()));
  }
  if (IsOfUpdate(request.kind()) && request.version() == 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("job '%s': no update makes version 0: pull its parameters or its state", name));
  }
  for (uint32_t b = request.bucket_begin(); b < request.bucket_end(); ++b) {
    std::vector<Delivery> ready;
    std::optional<Delivery> answer =
        AnswerOrWait(b, {member, out, request.kind(), request.version(), std::nullopt}, &ready);
    if (answer) ready.push_back(*std::move(answer));
    Deliver(std::move(ready));  // now: parameters of the first bucket travel while those of the next are written down
  }
  return absl::OkStatus();
}

absl::Status Desk::AcknowledgeFrame(MemberId member, const v1::PushAck& ack, std::span<const v1::PullKind> pull,
                                    const std::shared_ptr<Outbox>& out) {
  for (v1::PullKind kind : pull) GW_RETURN_IF_ERROR(answers_.CheckKind(kind));
  const uint64_t version = answers_.VersionAfter(ack);
  std::vector<Delivery> ready, given_up;
  for (v1::PullKind kind : pull) {
    if (ack.outcome() == v1::PUSH_REFUSED) break;
    std::optional<Delivery> answer = AnswerOrWait(ack.bucket(), {member, out, kind, version, ack.round()}, &given_up);
    if (answer) ready.push_back(*std::move(answer));
  }
  Deliver(std::move(given_up));
  if (ready.empty()) {
    // A send fails only when the stream is closing; OnClosed follows.
    out->Send({ack.SerializeAsString(), {}}).IgnoreError();
    return absl::OkStatus();
  }
  ready.front().outcome = ack.outcome();
  ready.front().open_round = ack.open_round();
  ready.front().made = ack.made();
  ready.front().abstained = ack.abstained();
  Deliver(std::move(ready));
  return absl::OkStatus();
}

std::optional<Delivery> Desk::AnswerOrWait(uint32_t b, Waiter waiter, std::vector<Delivery>* given_up) {
  BucketState& bucket = *parts_.buckets[b];
  absl::MutexLock lock(&bucket.mu);
  std::optional<Delivery> answer = Answer(bucket, waiter);
  if (answer) return answer;
  const auto of_member = [&waiter](const Waiter& w) { return w.member == waiter.member; };
  const auto waits = std::count_if(bucket.waiting.begin(), bucket.waiting.end(), of_member);
  if (static_cast<size_t>(waits) >= MaxWaitersPerMember(parts_.job)) {
    absl::Status refusal = absl::ResourceExhaustedError(
        absl::StrFormat("job '%s' bucket %d: %d pulls of this worker wait already, at most %d may",
                        parts_.job.spec().name(), b, waits, MaxWaitersPerMember(parts_.job)));
    // A worker that resumed pulls again, while this shard may not know yet that its earlier streams are gone.
    const auto old = std::find_if(bucket.waiting.begin(), bucket.waiting.end(),
                                  [&](const Waiter& w) { return of_member(w) && w.out != waiter.out; });
    if (old == bucket.waiting.end()) return Delivery{std::move(waiter), b, std::move(refusal), nullptr};
    given_up->push_back({*old, b, std::move(refusal), nullptr});
    bucket.waiting.erase(old);
  }
  Prepare(bucket, &waiter);
  bucket.waiting.push_back(std::move(waiter));
  return std::nullopt;
}

void Desk::Prepare(BucketState& bucket, Waiter* waiter) {
  if (waiter->prepared != nullptr || IsOfUpdate(waiter->kind) || !bucket.ready) return;
  if (!answers_.IsWaitingForParameters(bucket, *waiter)) return;
  // Where memory runs out, the answer is tried for once more when it is due.
  CatchBadAlloc("parameters for pullers", [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) {
    waiter->prepared = SerializeParameters(bucket, waiter->kind);
    waiter->prepared_version = bucket.version;
    return absl::OkStatus();
  }).IgnoreError();
}

std::optional<Delivery> Desk::Answer(BucketState& bucket, const Waiter& waiter) {
  if (!bucket.failure.ok()) return Delivery{waiter, bucket.layout->bucket, bucket.failure, nullptr};
  if (waiter.version > std::min(bucket.version, bucket.durable) || !bucket.ready) return std::nullopt;
  return answers_.Answer(bucket, waiter);
}

void Desk::Forget(const std::shared_ptr<Outbox>& out) {
  for (const auto& bucket : parts_.buckets) {
    absl::MutexLock lock(&bucket->mu);
    std::erase_if(bucket->waiting, [&](const Waiter& w) { return w.out == out; });
  }
}

std::vector<Delivery> Desk::TakeReady(BucketState& bucket) {
  std::vector<Delivery> ready;
  std::vector<Waiter> waiting;
  ready.reserve(bucket.waiting.size());  // so that no waiter is lost where memory runs out
  waiting.reserve(bucket.waiting.size());
  for (Waiter& waiter : bucket.waiting) {
    if (std::optional<Delivery> answer = Answer(bucket, waiter)) {
      ready.push_back(*std::move(answer));
    } else {
      Prepare(bucket, &waiter);
      waiting.push_back(std::move(waiter));
    }
  }
  bucket.waiting = std::move(waiting);
  return ready;
}

void Desk::Deliver(std::vector<Delivery> deliveries) {
  for (Delivery& delivery : deliveries) {
    const absl::Status sent = CatchBadAlloc("an answer", [&] { return Send(delivery); });
    delivery.frame = nullptr;
    if (sent.ok()) continue;
    // A worker that lets its answers pile up is told so in place of the next one.
    delivery.status = absl::Status(sent.code(), absl::StrFormat("job '%s' bucket %d: %s", parts_.job.spec().name(),
                                                                delivery.bucket, sent.message()));
    CatchBadAlloc("an answer", [&] { return Send(delivery); }).IgnoreError();
  }
}

absl::Status Desk::Send(const Delivery& delivery) {
  Outbox& out = *delivery.to.out;
  TraceSpan span(&parts_.trace, {.stage = v1::TRACE_ANSWER,
                                 .round = delivery.to.version - 1,
                                 .bucket = delivery.bucket,
                                 .member = delivery.to.member});
  // Rounds of one bucket may be delivered by two threads at once, and those of a frame that came twice.
  absl::MutexLock whole(&out.one_answer());
  if (delivery.frame == nullptr || delivery.frame->pieces().empty()) {
    out.Send({ControlOf(delivery, true, true), {}}).IgnoreError();  // it fails only when the stream is closing
    return absl::OkStatus();
  }
  std::span<const Bytes> pieces = delivery.frame->pieces();
  const uint64_t bytes = TotalSize(pieces);
  if (out.unsent() != nullptr) GW_RETURN_IF_ERROR(out.unsent()->CheckRoom(bytes));
  span.SetBytes(bytes);
  std::shared_ptr<const void> counted;
  if (out.unsent() != nullptr) counted = UnsentBudget::Count(out.unsent(), delivery.frame, bytes);
  for (size_t number = 0; !pieces.empty(); ++number) {
    GW_FAILPOINT("answer.before_chunk");
    const std::span<const Bytes> chunk = pieces.first(wire::PiecesOfChunk(pieces));
    pieces = pieces.subspan(chunk.size());
    const size_t size = TotalSize(chunk);
    transport::Message message{ControlOf(delivery, number == 0, pieces.empty()), {}};
    // Updates were complete when their round was written.
    if (!IsOfUpdate(delivery.to.kind)) message.late = [frame = delivery.frame, number] { frame->Complete(number); };
    for (const Bytes& piece : chunk)
      message.frame.push_back(counted == nullptr ? piece : Bytes(counted, piece.data(), piece.size()));
    // A stream that has closed loses its answer; its worker pulls again on the next one.
    if (!out.Send(std::move(message)).ok()) break;
    if (IsOfUpdate(delivery.to.kind)) {
      parts_.traffic.NoteUpdatePulled(size);
    } else {
      parts_.traffic.NoteParametersPulled(size);
    }
  }
  return absl::OkStatus();
}

}  // namespace gradwire

// Answers for pullers: update frames and parameters of a version; see job_shard.h.
#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/failpoint.h"
#include "common/base/out_of_memory.h"
#include "common/base/status_macros.h"
#include "common/job/norms.h"
#include "common/job/round_mode.h"
#include "server/job/job_shard.h"

namespace gradwire {
namespace {

absl::Status CheckKind(const Job& job, v1::PullKind kind) {
  const bool parameters = kind == v1::PULL_PARAMS_F32 || kind == v1::PULL_PARAMS_BF16;
  if (parameters || (!IsAsync(job) && (kind == v1::PULL_UPDATE || kind == v1::PULL_STATE))) return absl::OkStatus();
  const std::string& name = job.spec().name();
  if (!v1::PullKind_IsValid(kind) || kind == v1::PULL_UNSPECIFIED) {
    return absl::InvalidArgumentError(absl::StrFormat("job '%s': unknown pull kind %d", name, kind));
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("job '%s' has asynchronous rounds: its workers pull parameters (params or params_bf16), not %s",
                      name, kind == v1::PULL_UPDATE ? "updates" : "the optimizer's state"));
}

ParameterContent ContentOf(v1::PullKind kind) {
  if (kind == v1::PULL_PARAMS_BF16) return ParameterContent::kBf16;
  return kind == v1::PULL_STATE ? ParameterContent::kState : ParameterContent::kFloat32;
}

// The control message of one chunk of an answer, or of why there is none.
std::string ControlOf(const Delivery& delivery, bool first, bool last) {
  const auto fill = [&](auto& control) {
    control.set_bucket(delivery.bucket);
    control.set_kind(delivery.to.kind);
    control.set_last(last);
    if (delivery.chunks != nullptr) return;
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
    }
    return ack.SerializeAsString();
  }
  v1::PullMessage message;
  fill(message);
  message.set_version(delivery.to.version);
  return message.SerializeAsString();
}

}  // namespace

absl::Status JobShard::Pull(MemberId member, const v1::PullRequest& request, const std::shared_ptr<Outbox>& out) {
  const std::string& name = job_.spec().name();
  {
    absl::MutexLock lock(&mu_);
    if (!shut_.ok()) return shut_;
    if (machine_.membership().Get(member) == nullptr) {
      return absl::NotFoundError(absl::StrFormat(
          "job '%s': the worker is no longer a member (it left, or its lease ended): join again", name));
    }
  }
  GW_RETURN_IF_ERROR(CheckKind(job_, request.kind()));
  if (request.bucket_begin() >= request.bucket_end() || request.bucket_end() > buckets_.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("job '%s': bucket range [%d, %d) is not within the %d buckets of this job", name,
                        request.bucket_begin(), request.bucket_end(), buckets_.size()));
  }
  if (request.kind() == v1::PULL_UPDATE && request.version() == 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("job '%s': no update makes version 0: pull its parameters or its state", name));
  }
  std::vector<Delivery> ready, given_up;
  for (uint32_t b = request.bucket_begin(); b < request.bucket_end(); ++b) {
    std::optional<Delivery> answer =
        AnswerOrWait(b, {member, out, request.kind(), request.version(), std::nullopt}, &given_up);
    if (answer) ready.push_back(*std::move(answer));
  }
  Deliver(std::move(given_up));
  Deliver(std::move(ready));
  return absl::OkStatus();
}

absl::Status JobShard::Acknowledge(MemberId member, const v1::PushAck& ack, std::span<const v1::PullKind> pull,
                                   const std::shared_ptr<Outbox>& out) {
  for (v1::PullKind kind : pull) GW_RETURN_IF_ERROR(CheckKind(job_, kind));
  const uint64_t version = IsAsync(job_) ? ack.made() : ack.round() + 1;
  std::vector<Delivery> ready, given_up;
  for (v1::PullKind kind : pull) {
    if (ack.outcome() == v1::PUSH_REFUSED) break;
    std::optional<Delivery> answer =
        AnswerOrWait(ack.bucket(), {member, out, kind, version, ack.round()}, &given_up);
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
  Deliver(std::move(ready));
  return absl::OkStatus();
}

std::optional<Delivery> JobShard::AnswerOrWait(uint32_t b, Waiter waiter, std::vector<Delivery>* given_up) {
  BucketState& bucket = *buckets_[b];
  absl::MutexLock lock(&bucket.mu);
  std::optional<Delivery> answer = Answer(bucket, waiter);
  if (answer) return answer;
  const auto of_member = [&waiter](const Waiter& w) { return w.member == waiter.member; };
  const auto waits = std::count_if(bucket.waiting.begin(), bucket.waiting.end(), of_member);
  if (static_cast<size_t>(waits) >= MaxWaitersPerMember(job_)) {
    absl::Status refusal = absl::ResourceExhaustedError(
        absl::StrFormat("job '%s' bucket %d: %d pulls of this worker wait already, at most %d may",
                        job_.spec().name(), b, waits, MaxWaitersPerMember(job_)));
    // A worker that resumed pulls again, while this shard may not know yet that its earlier streams are gone.
    const auto old = std::find_if(bucket.waiting.begin(), bucket.waiting.end(), [&](const Waiter& w) {
      return of_member(w) && w.out != waiter.out;
    });
    if (old == bucket.waiting.end()) return Delivery{std::move(waiter), b, std::move(refusal), nullptr};
    given_up->push_back({*old, b, std::move(refusal), nullptr});
    bucket.waiting.erase(old);
  }
  PrepareAnswer(bucket, &waiter);
  bucket.waiting.push_back(std::move(waiter));
  return std::nullopt;
}

void JobShard::PrepareAnswer(BucketState& bucket, Waiter* waiter) {
  if (waiter->prepared != nullptr || waiter->kind == v1::PULL_UPDATE || !bucket.ready) return;
  if (IsAsync(job_) ? waiter->version > bucket.version : waiter->version != bucket.version) return;
  // Where memory runs out, the answer is tried for once more when it is due.
  CatchBadAlloc("parameters for pullers", [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) {
    waiter->prepared = Serialize(bucket, waiter->kind);
    waiter->prepared_version = bucket.version;
    return absl::OkStatus();
  }).IgnoreError();
}

std::optional<Delivery> JobShard::Answer(BucketState& bucket, const Waiter& waiter) {
  const uint32_t b = bucket.layout->bucket;
  const std::string& name = job_.spec().name();
  if (!bucket.failure.ok()) return Delivery{waiter, b, bucket.failure, nullptr};
  if (waiter.version > std::min(bucket.version, bucket.durable) || !bucket.ready) return std::nullopt;
  // With asynchronous rounds any later version will do, as soon as all that is in it may be seen.
  const uint64_t offered = waiter.prepared != nullptr ? waiter.prepared_version : bucket.version;
  if (IsAsync(job_) && bucket.durable < offered) return std::nullopt;
  const uint64_t age = IsAsync(job_) ? 0 : bucket.version - waiter.version;
  if (waiter.kind == v1::PULL_UPDATE) {
    if (age < bucket.updates.size()) {
      return Delivery{waiter, b, absl::OkStatus(), bucket.updates[bucket.updates.size() - 1 - age].chunks};
    }
    if (const auto owed = bucket.owed.find(waiter.version); owed != bucket.owed.end()) {
      return Delivery{waiter, b, absl::OkStatus(), owed->second};
    }
    if (SkipsNonFinite(job_) && waiter.version < bucket.owed_from) {
      return Delivery{waiter, b,
                      absl::DataLossError(absl::StrFormat(
                          "job '%s' bucket %d: whether round %d was skipped is no longer known: this worker was away "
                          "for too long; join again",
                          name, b, waiter.version - 1)),
                      nullptr};
    }
    return Delivery{
        waiter, b,
        absl::OutOfRangeError(absl::StrFormat(
            "job '%s' bucket %d: the update of version %d is no longer kept (versions %d to %d are): pull the "
            "parameters and start from version %d",
            name, b, waiter.version, bucket.version - bucket.updates.size() + 1, bucket.version, bucket.version)),
        nullptr};
  }
  if (waiter.prepared != nullptr) return Delivery{waiter, b, absl::OkStatus(), waiter.prepared};
  if (age != 0) {
    return Delivery{
        waiter, b,
        absl::OutOfRangeError(absl::StrFormat(
            "job '%s' bucket %d: parameters of version %d were replaced by version %d: start from version %d", name, b,
            waiter.version, bucket.version, bucket.version)),
        nullptr};
  }
  // Also called while a round is published: an exception here would lose the other waiters of the bucket.
  absl::StatusOr<SharedChunks> chunks = CatchBadAlloc(
      "parameters for pullers", [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) -> absl::StatusOr<SharedChunks> {
        return Serialize(bucket, waiter.kind);
      });
  if (!chunks.ok()) return Delivery{waiter, b, chunks.status(), nullptr};
  return Delivery{waiter, b, absl::OkStatus(), *std::move(chunks)};
}

SharedChunks JobShard::Serialize(BucketState& bucket, v1::PullKind kind) {
  if (bucket.serialized != nullptr && bucket.serialized_kind == kind) return bucket.serialized;
  bucket.serialized =
      std::make_shared<const std::vector<Bytes>>(bucket.store->Serialize(bucket.plans, ContentOf(kind)));
  bucket.serialized_kind = kind;
  return bucket.serialized;
}

std::vector<Delivery> JobShard::TakeReady(BucketState& bucket) {
  std::vector<Delivery> ready;
  std::vector<Waiter> waiting;
  ready.reserve(bucket.waiting.size());  // so that no waiter is lost where memory runs out
  waiting.reserve(bucket.waiting.size());
  for (Waiter& waiter : bucket.waiting) {
    if (std::optional<Delivery> answer = Answer(bucket, waiter)) {
      ready.push_back(*std::move(answer));
    } else {
      PrepareAnswer(bucket, &waiter);
      waiting.push_back(std::move(waiter));
    }
  }
  bucket.waiting = std::move(waiting);
  return ready;
}

void JobShard::Deliver(std::vector<Delivery> deliveries) {
  for (Delivery& delivery : deliveries) {
    const absl::Status sent = CatchBadAlloc("an answer", [&] { return Send(delivery); });
    if (sent.ok()) continue;
    // A worker that lets its answers pile up is told so in place of the next one.
    delivery.status = absl::Status(
        sent.code(), absl::StrFormat("job '%s' bucket %d: %s", job_.spec().name(), delivery.bucket, sent.message()));
    delivery.chunks = nullptr;
    CatchBadAlloc("an answer", [&] { return Send(delivery); }).IgnoreError();
  }
}

absl::Status JobShard::Send(const Delivery& delivery) {
  Outbox& out = *delivery.to.out;
  if (delivery.chunks == nullptr || delivery.chunks->empty()) {
    out.Send({ControlOf(delivery, true, true), {}}).IgnoreError();  // it fails only when the stream is closing
    return absl::OkStatus();
  }
  std::vector<Bytes> chunks = *delivery.chunks;
  if (out.unsent() != nullptr) {
    GW_ASSIGN_OR_RETURN(chunks, UnsentBudget::Count(out.unsent(), chunks));
  }
  for (size_t i = 0; i < chunks.size(); ++i) {
    GW_FAILPOINT("answer.before_chunk");
    const size_t size = chunks[i].size();
    // A stream that has closed loses its answer; its worker pulls again on the next one.
    if (!out.Send({ControlOf(delivery, i == 0, i + 1 == chunks.size()), {std::move(chunks[i])}}).ok()) break;
    (delivery.to.kind == v1::PULL_UPDATE ? pull_bytes_ : parameter_bytes_) += size;
  }
  return absl::OkStatus();
}

}  // namespace gradwire

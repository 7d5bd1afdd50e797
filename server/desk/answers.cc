// See answers.h.
#include "server/desk/answers.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/out_of_memory.h"
#include "common/base/status_macros.h"
#include "common/codec/update/update.h"
#include "common/job/norms.h"

namespace gradwire {
namespace {

ParameterContent ContentOf(v1::PullKind kind) {
  if (kind == v1::PULL_PARAMS_BF16) return ParameterContent::kBf16;
  return kind == v1::PULL_STATE ? ParameterContent::kState : ParameterContent::kFloat32;
}

// A plan is kept for others who ask for it where it takes no more than this, or than this part of its update frame.
constexpr uint64_t kKeptPlanBytes = 4096;
constexpr uint64_t kKeptPlanPart = 16;

Delivery Refusal(const BucketState& bucket, const Waiter& waiter, absl::Status why) {
  return Delivery{waiter, bucket.layout->bucket, std::move(why), nullptr};
}

}  // namespace

absl::Status Answers::CheckKind(v1::PullKind kind) const {
  if (kind == v1::PULL_PARAMS_F32 || kind == v1::PULL_PARAMS_BF16) return absl::OkStatus();
  if (v1::PullKind_IsValid(kind) && kind != v1::PULL_UNSPECIFIED) return CheckOtherKind(kind);
  return absl::InvalidArgumentError(absl::StrFormat("job '%s': unknown pull kind %d", job_.spec().name(), kind));
}

Delivery Answers::Parameters(BucketState& bucket, const Waiter& waiter) {
  if (waiter.prepared != nullptr) return Delivery{waiter, bucket.layout->bucket, absl::OkStatus(), waiter.prepared};
  // Also called while a round is published: an exception here would lose the other waiters of the bucket.
  absl::StatusOr<SharedFrame> frame = CatchBadAlloc(
      "parameters for pullers", [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) -> absl::StatusOr<SharedFrame> {
        return SerializeParameters(bucket, waiter.kind);
      });
  if (!frame.ok()) return Refusal(bucket, waiter, frame.status());
  return Delivery{waiter, bucket.layout->bucket, absl::OkStatus(), *std::move(frame)};
}

SharedFrame SerializeParameters(BucketState& bucket, v1::PullKind kind) {
  if (bucket.serialized != nullptr && bucket.serialized_kind == kind) return bucket.serialized;
  bucket.serialized = std::make_shared<const wire::FrameToSend>(bucket.store->Serialize(bucket.plans, ContentOf(kind)));
  bucket.serialized_kind = kind;
  return bucket.serialized;
}

bool RoundAnswers::IsWaitingForParameters(const BucketState& bucket, const Waiter& waiter) const {
  return waiter.version == bucket.version;
}

std::optional<Delivery> RoundAnswers::Answer(BucketState& bucket, const Waiter& waiter) const {
  if (waiter.kind == v1::PULL_UPDATE) return UpdateOf(bucket, waiter);
  if (waiter.kind == v1::PULL_PLAN) return PlanOf(bucket, waiter);
  if (waiter.prepared != nullptr || waiter.version == bucket.version) return Parameters(bucket, waiter);
  return Refusal(bucket, waiter,
                 absl::OutOfRangeError(absl::StrFormat(
                     "job '%s' bucket %d: parameters of version %d were replaced by version %d: start from version %d",
                     job_.spec().name(), bucket.layout->bucket, waiter.version, bucket.version, bucket.version)));
}

Delivery RoundAnswers::UpdateOf(const BucketState& bucket, const Waiter& waiter) const {
  const uint32_t b = bucket.layout->bucket;
  const std::string& name = job_.spec().name();
  const uint64_t age = bucket.version - waiter.version;
  if (age < bucket.updates.size()) {
    return Delivery{waiter, b, absl::OkStatus(), bucket.updates[bucket.updates.size() - 1 - age].frame};
  }
  if (const auto owed = bucket.owed.find(waiter.version); owed != bucket.owed.end()) {
    return Delivery{waiter, b, absl::OkStatus(), owed->second};
  }
  if (SkipsNonFinite(job_) && waiter.version < bucket.owed_from) {
    return Refusal(bucket, waiter,
                   absl::DataLossError(absl::StrFormat(
                       "job '%s' bucket %d: whether round %d was skipped is no longer known: this worker was away "
                       "for too long; join again",
                       name, b, waiter.version - 1)));
  }
  return Refusal(
      bucket, waiter,
      absl::OutOfRangeError(absl::StrFormat(
          "job '%s' bucket %d: the update of version %d is no longer kept (versions %d to %d are): pull the "
          "parameters and start from version %d",
          name, b, waiter.version, bucket.version - bucket.updates.size() + 1, bucket.version, bucket.version)));
}

Delivery RoundAnswers::PlanOf(BucketState& bucket, const Waiter& waiter) const {
  if (bucket.plan_only != nullptr && bucket.plan_only_version == waiter.version)
    return Delivery{waiter, bucket.layout->bucket, absl::OkStatus(), bucket.plan_only};
  Delivery delivery = UpdateOf(bucket, waiter);
  if (!delivery.status.ok()) return delivery;
  absl::StatusOr<SharedFrame> frame = CatchBadAlloc("a plan for pullers", [&]() -> absl::StatusOr<SharedFrame> {
    GW_ASSIGN_OR_RETURN(std::vector<Bytes> plan, WithoutBody(delivery.frame->pieces()));
    return std::make_shared<const wire::FrameToSend>(std::move(plan));
  });
  if (!frame.ok()) return Refusal(bucket, waiter, frame.status());
  if (TotalSize((*frame)->pieces()) <=
      std::max<uint64_t>(kKeptPlanBytes, TotalSize(delivery.frame->pieces()) / kKeptPlanPart)) {
    bucket.plan_only = *frame;
    bucket.plan_only_version = waiter.version;
  }
  delivery.frame = *std::move(frame);
  return delivery;
}

absl::Status NewestAnswers::CheckOtherKind(v1::PullKind kind) const {
  return absl::InvalidArgumentError(
      absl::StrFormat("job '%s' has asynchronous rounds: its workers pull parameters (params or params_bf16), not %s",
                      job_.spec().name(), kind == v1::PULL_STATE ? "the optimizer's state" : "updates"));
}

bool NewestAnswers::IsWaitingForParameters(const BucketState& bucket, const Waiter& waiter) const {
  return waiter.version <= bucket.version;
}

std::optional<Delivery> NewestAnswers::Answer(BucketState& bucket, const Waiter& waiter) const {
  const uint64_t offered = waiter.prepared != nullptr ? waiter.prepared_version : bucket.version;
  if (bucket.durable < offered) return std::nullopt;
  return Parameters(bucket, waiter);
}

}  // namespace gradwire

// Which versions of a bucket answer a pull: chosen with the job's rounds, asked by the desk.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "common/job/job.h"
#include "gradwire/v1/worker.pb.h"
#include "server/desk/delivery.h"
#include "server/job/bucket_state.h"

namespace gradwire {

// Stateless: what it is asked of is the bucket's. The job outlives it.
class Answers {
 public:
  explicit Answers(const Job* job) : job_(*job) {}
  virtual ~Answers() = default;

  // InvalidArgument: this is not pulled in this job, or not known.
  absl::Status CheckKind(v1::PullKind kind) const;
  // That a worker asks for with the frame that this acknowledges.
  virtual uint64_t VersionAfter(const v1::PushAck& ack) const = 0;
  // The parameters of the bucket's version are what the waiter waits for, whether they may be seen yet or not.
  virtual bool IsWaitingForParameters(const BucketState& bucket, const Waiter& waiter) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) = 0;
  // What the waiter gets, or why not. Its version is there and may be seen. Nothing: what it would get may not be seen.
  virtual std::optional<Delivery> Answer(BucketState& bucket, const Waiter& waiter) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) = 0;

 protected:
  // Of a kind other than parameters.
  virtual absl::Status CheckOtherKind(v1::PullKind kind) const = 0;
  static Delivery Parameters(BucketState& bucket, const Waiter& waiter) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);

  const Job& job_;
};

// The bucket's parameters, encoded once per version and kind. May throw where memory runs out.
SharedFrame SerializeParameters(BucketState& bucket, v1::PullKind kind) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);

// Rounds that all workers make together: the update of a round and the parameters of a version, exactly those.
class RoundAnswers final : public Answers {
 public:
  using Answers::Answers;
  uint64_t VersionAfter(const v1::PushAck& ack) const override { return ack.round() + 1; }
  bool IsWaitingForParameters(const BucketState& bucket, const Waiter& waiter) const override
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  std::optional<Delivery> Answer(BucketState& bucket, const Waiter& waiter) const override
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);

 private:
  absl::Status CheckOtherKind(v1::PullKind) const override { return absl::OkStatus(); }
  Delivery UpdateOf(const BucketState& bucket, const Waiter& waiter) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  // The update without its body; a small one is made once for all who ask for it.
  Delivery PlanOf(BucketState& bucket, const Waiter& waiter) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
};

// Asynchronous rounds: parameters of the version or of any later one, as soon as all that is in it may be seen.
class NewestAnswers final : public Answers {
 public:
  using Answers::Answers;
  uint64_t VersionAfter(const v1::PushAck& ack) const override { return ack.made(); }
  bool IsWaitingForParameters(const BucketState& bucket, const Waiter& waiter) const override
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  std::optional<Delivery> Answer(BucketState& bucket, const Waiter& waiter) const override
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);

 private:
  absl::Status CheckOtherKind(v1::PullKind kind) const override;
};

}  // namespace gradwire

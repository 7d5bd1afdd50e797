// Where pullers of a job wait: each is answered at once, or when the version that it asks for exists and may be seen.
//
//   Pull, AcknowledgeFrame -> an answer, or a waiter of the bucket
//   a version was applied, or its record is safe -> TakeReady (under the bucket's mutex) -> Deliver (under none)
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "gradwire/v1/worker.pb.h"
#include "server/desk/answers.h"
#include "server/desk/delivery.h"
#include "server/job/job_parts.h"

namespace gradwire {

// Thread-safe. Who waits is in BucketState::waiting: at most MaxWaitersPerMember of each member and bucket.
class Desk {
 public:
  Desk(JobParts* parts, const Answers* answers) : parts_(*parts), answers_(*answers) {}

  // Answers every bucket of the request through `out`, now or when the version exists. Errors end the stream.
  absl::Status Pull(MemberId member, const v1::PullRequest& request, const std::shared_ptr<Outbox>& out);
  // Sends the acknowledgement of a frame through `out`, and answers `pull` for the version that its round makes, now or
  // when that exists; in one message where both are due at once. An error ends the stream.
  absl::Status AcknowledgeFrame(MemberId member, const v1::PushAck& ack, std::span<const v1::PullKind> pull,
                                const std::shared_ptr<Outbox>& out);
  // The stream has closed: nobody waits there any more.
  void Forget(const std::shared_ptr<Outbox>& out);

  // Of those who wait for the bucket, the answers that are due; whoever is not yet due gets a copy of parameters that
  // the bucket is about to leave behind.
  std::vector<Delivery> TakeReady(BucketState& bucket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  void Deliver(std::vector<Delivery> deliveries);

 private:
  // Keeps the waiter if its version does not exist yet. `given_up`: the refusal of an older one, of another stream of
  // this member, that gave way.
  std::optional<Delivery> AnswerOrWait(uint32_t bucket, Waiter waiter, std::vector<Delivery>* given_up);
  std::optional<Delivery> Answer(BucketState& bucket, const Waiter& waiter) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  // Of a waiter whose version is there and may not be seen yet.
  void Prepare(BucketState& bucket, Waiter* waiter) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  // ResourceExhausted, and nothing was sent: the worker reads too little of what it asked for.
  absl::Status Send(const Delivery& delivery);

  JobParts& parts_;
  const Answers& answers_;
};

}  // namespace gradwire

// The steps of one worker with asynchronous rounds: each bucket on each shard (a slice) is pushed on the version that
// the worker has of it, and pulled at whichever version is the newest then.
//
//   TensorReady -> [encoding threads: ingest, select; encode, send, ask for parameters] -> shard
//   shard -> ack, parameters -> [EndRound: settle the frame, load the parameters]
//
// A frame that is alone in its version is decoded by its worker as the shard decodes it: what it defers is known here,
// no update is pulled.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/internal/slice_work.h"
#include "client/cpp/internal/tasked_exchanger.h"

namespace gradwire::client {

// One step of a worker's round.
struct AsyncTask {
  enum class Kind { kTensor, kEncode, kPull, kResend };
  Kind kind = Kind::kTensor;
  uint32_t index = 0;  // tensor; slice; slice; shard
  GivenGradient gradient;
};

// Thread-safety as Session says. Owns the encoding threads, from construction to Stop, or none (see kThreadsAbove).
// Memory in flight: one frame and the parameters of every slice; for sparse codecs an accumulator of each.
class AsyncExchange final : public TaskedExchanger<AsyncTask> {
 public:
  // `versions` and `plans`: of the parameters in the replica, per slice. `links` outlive this. `encode_threads`:
  // SessionOptions.encode_threads.
  AsyncExchange(const SliceContext& context, std::vector<FrameLink*> links, const std::vector<uint64_t>& versions,
                std::vector<PlanWindow> plans, uint32_t encode_threads = 1,
                const Coalescing& coalescing = Coalescing());
  ~AsyncExchange() override;

  absl::Status Begin(std::span<const float> learning_rates) override;
  absl::Status BeginReplacement() override;
  absl::Status End(int64_t timeout_ms) override;
  absl::Status Drain(int64_t timeout_ms) override;  // at once: End leaves nothing
  absl::Status WaitPushed(uint32_t bucket, int64_t timeout_ms) override;
  absl::Status WaitApplied(uint32_t bucket, int64_t timeout_ms) override;
  void Stop(const absl::Status& reason) override;
  uint64_t version() const override;  // that every slice has passed
  absl::StatusOr<std::vector<PlanWindow>> Plans() const override;

  void OnAck(uint32_t shard, const v1::PushAck& ack) override;
  void OnAnswer(uint32_t shard, PullAnswer answer) override;
  void OnMustInitialize(uint32_t /*shard*/) override {}
  std::optional<ResumePoint> ResumeAt(uint32_t shard) override;
  void OnResumed(uint32_t shard, bool behind) override;
  void OnLost(uint32_t shard, const absl::Status& status) override;

 private:
  // What became of a slice's gradient in this step.
  enum class Fate { kNotSent, kIncluded, kNotIncluded, kRefused };
  struct Slice {
    PlanWindow plans;
    uint64_t version = 0;  // of the parameters in the replica
    Encoder* encoder = nullptr;
    std::unique_ptr<Accumulator> decoder;  // of sparse codecs: for its own frames; made when first needed
    // Of the step. The frame is kept until it is settled, never encoded again.
    std::optional<EncodedFrame> frame;
    Fate fate = Fate::kNotSent;
    bool sending = false;     // the bytes of the frame are in use
    bool unanswered = false;  // what became of the frame is not known
    bool waiting = false;     // for parameters, of version `least` or later
    bool settled = false;
    uint64_t least = 0;
    uint64_t arrived = 0;             // version of the parameters in `chunks`
    std::vector<wire::Chunk> chunks;  // while `unanswered`, they may turn out to be too old
    bool Complete() const { return !settled && !sending && !unanswered && !waiting && !chunks.empty(); }
  };
  using Task = AsyncTask;

  v1::PullKind Kind() const;
  // Settles slices as they come until `done`.
  template <typename Done>
  absl::Status SettleUntil(Done done, absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Takes back what the frame of a complete slice did not bring, and loads its parameters. Without the lock.
  absl::Status Settle(uint32_t index);
  absl::StatusOr<std::vector<uint32_t>> DeferredOf(uint32_t index);
  template <typename Is>
  bool Every(uint32_t job_bucket, Is is) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Task TaskOf(uint32_t tensor, const GivenGradient& gradient) override {
    return {Task::Kind::kTensor, tensor, gradient};
  }
  TaskPlace PlaceOf(const Task& task) const override;
  void Work(const Task& task) override ABSL_LOCKS_EXCLUDED(mu_);
  void ProcessTensor(const Task& task);
  void Encode(uint32_t index);
  void SendFrame(uint32_t index);
  void Pull(uint32_t index);
  void Resend(uint32_t shard);
  void Sent(uint32_t index, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);

  void NoteAck(uint32_t shard, const v1::PushAck& ack) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // What became of the frame is known now, and with it which parameters the slice waits for.
  void NoteLeast(Slice* slice, uint64_t least) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const SliceContext context_;

  bool settling_ ABSL_GUARDED_BY(mu_) = false;
  // What tells of messages is guarded by mu_. Frame and encoder belong to the task at work until the frame is sent,
  // and once a slice is complete all of it to who settles it.
  std::vector<Slice> slices_;
};

}  // namespace gradwire::client

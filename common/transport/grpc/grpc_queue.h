// A gRPC completion queue, as the threads of a Poller see it.
#pragma once

#include <grpcpp/alarm.h>
#include <grpcpp/completion_queue.h>

#include <chrono>
#include <functional>
#include <utility>

#include "common/transport/poller.h"

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

namespace gradwire::transport {

// The tag to start an operation with. What the starting thread did so far happens before the completion runs; gRPC's
// queue orders that, and ThreadSanitizer, which cannot see inside an uninstrumented gRPC, is told here.
inline void* Tag(Completion* completion) {
#ifdef __SANITIZE_THREAD__
  __tsan_release(completion);
#endif
  return completion;
}

// Thread-safe. `queue` must outlive it.
class GrpcQueue final : public CompletionQueue {
 public:
  explicit GrpcQueue(::grpc::CompletionQueue* queue) : queue_(queue) {}

  Got Next(Event* event) override {
    void* tag = nullptr;
    const bool more = queue_->Next(&tag, &event->ok);
    return Take(more ? ::grpc::CompletionQueue::GOT_EVENT : ::grpc::CompletionQueue::SHUTDOWN, tag, event);
  }
  Got TryNext(Event* event) override {
    void* tag = nullptr;
    const auto status = queue_->AsyncNext(&tag, &event->ok, gpr_inf_past(GPR_CLOCK_MONOTONIC));
    return Take(status, tag, event);
  }
  void Shutdown() override { queue_->Shutdown(); }

 private:
  static Got Take(::grpc::CompletionQueue::NextStatus status, void* tag, Event* event) {
    if (status == ::grpc::CompletionQueue::TIMEOUT) return Got::kNothing;
    if (status == ::grpc::CompletionQueue::SHUTDOWN) return Got::kEnd;
#ifdef __SANITIZE_THREAD__
    __tsan_acquire(tag);
#endif
    event->completion = static_cast<Completion*>(tag);
    return Got::kCompletion;
  }

  ::grpc::CompletionQueue* const queue_;
};

// The timer of a completion queue, for a Ticker. Not thread-safe.
class GrpcTimer {
 public:
  GrpcTimer(::grpc::CompletionQueue* queue, std::function<void()> fired)
      : queue_(queue), fired_(std::move(fired)), ended_(this, &GrpcTimer::OnEnd) {}
  void Start(std::chrono::milliseconds period) {
    alarm_.Set(queue_, std::chrono::system_clock::now() + period, Tag(&ended_));
  }
  void Cancel() { alarm_.Cancel(); }

 private:
  void OnEnd(bool) { fired_(); }

  ::grpc::CompletionQueue* const queue_;
  const std::function<void()> fired_;
  MemberCompletion<GrpcTimer> ended_;
  ::grpc::Alarm alarm_;
};

}  // namespace gradwire::transport

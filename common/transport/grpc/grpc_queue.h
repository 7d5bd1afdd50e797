// A gRPC completion queue, as the threads of a Poller see it.
#pragma once

#include <grpcpp/alarm.h>
#include <grpcpp/completion_queue.h>

#include <chrono>
#include <functional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/transport/catch_exhausted.h"
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

// Calls a function again and again on the threads of a queue. Thread-safe; to be stopped while the queue has threads.
class GrpcTicker {
 public:
  GrpcTicker(::grpc::CompletionQueue* queue, int64_t period_ms, std::function<void()> tick)
      : queue_(queue), period_(period_ms), tick_(std::move(tick)), ticked_(this, &GrpcTicker::OnTick) {
    absl::MutexLock lock(&mu_);
    Arm();
  }
  // Returns when the function does not run and will not run again.
  void Stop() {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
    alarm_.Cancel();
    mu_.Await(absl::Condition(&stopped_));
  }

 private:
  void Arm() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    alarm_.Set(queue_, std::chrono::system_clock::now() + period_, Tag(&ticked_));
  }
  void OnTick(bool) {
    bool stop = false;
    {
      absl::MutexLock lock(&mu_);
      stop = stopping_;
    }
    if (!stop) {
      CatchExhausted("a tick", [this] {
        tick_();
        return absl::OkStatus();
      }).IgnoreError();  // the next one is as good
    }
    absl::MutexLock lock(&mu_);
    if (stopping_) {
      stopped_ = true;
    } else {
      Arm();
    }
  }

  ::grpc::CompletionQueue* const queue_;
  const std::chrono::milliseconds period_;
  const std::function<void()> tick_;
  MemberCompletion<GrpcTicker> ticked_;
  absl::Mutex mu_;
  ::grpc::Alarm alarm_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace gradwire::transport

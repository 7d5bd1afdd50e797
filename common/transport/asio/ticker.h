// Calls a function again and again on the threads of a poller.
#pragma once

#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <functional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/transport/asio/io_queue.h"
#include "common/transport/catch_exhausted.h"

namespace gradwire::transport::tcp {

// Thread-safe. To be stopped while the queue still has threads.
class Ticker {
 public:
  Ticker(IoQueue* queue, int64_t period_ms, std::function<void()> tick)
      : period_(period_ms), tick_(std::move(tick)), timer_(queue->context()), ticked_(this, &Ticker::OnTick) {
    absl::MutexLock lock(&mu_);
    Arm();
  }
  // Returns when the function does not run and will not run again.
  void Stop() {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
    timer_.cancel();
    mu_.Await(absl::Condition(&stopped_));
  }

 private:
  void Arm() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    timer_.expires_after(period_);
    timer_.async_wait(IoQueue::Handler(&ticked_));
  }
  void OnTick(error_code, size_t) {
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

  const std::chrono::milliseconds period_;
  const std::function<void()> tick_;
  absl::Mutex mu_;
  asio::steady_timer timer_ ABSL_GUARDED_BY(mu_);
  Operation<Ticker> ticked_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace gradwire::transport::tcp

// Calls a function again and again on the threads of a poller. A transport brings the timer of its own queue.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/transport/catch_exhausted.h"

namespace gradwire::transport {

// `Timer` is made of a queue and a function, which it calls once after each Start, on a thread of that queue: when the
// period is over, or soon where Cancel was called.
// Thread-safe. To be stopped while the queue still has threads.
template <typename Timer>
class Ticker {
 public:
  template <typename Queue>
  Ticker(Queue* queue, int64_t period_ms, std::function<void()> tick)
      : period_(period_ms), tick_(std::move(tick)), timer_(queue, [this] { OnTimer(); }) {
    absl::MutexLock lock(&mu_);
    timer_.Start(period_);
  }
  // Returns when the function does not run and will not run again.
  void Stop() {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
    timer_.Cancel();
    mu_.Await(absl::Condition(&stopped_));
  }

 private:
  void OnTimer() {
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
    while (!StartOrStop()) absl::SleepFor(kRetry);
  }
  // False: there is no memory for the timer, without which nothing would tick again, or stop.
  bool StartOrStop() ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    if (stopping_) {
      stopped_ = true;
      return true;
    }
    return CatchExhausted("a timer",
                          [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
                            timer_.Start(period_);
                            return absl::OkStatus();
                          })
        .ok();
  }

  static constexpr absl::Duration kRetry = absl::Milliseconds(10);

  const std::chrono::milliseconds period_;
  const std::function<void()> tick_;
  absl::Mutex mu_;
  Timer timer_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace gradwire::transport

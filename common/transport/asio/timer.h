// The timer of an I/O context, for a Ticker.
#pragma once

#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <functional>
#include <utility>

#include "common/transport/asio/io_queue.h"

namespace gradwire::transport::tcp {

// Not thread-safe.
class Timer {
 public:
  Timer(IoQueue* queue, std::function<void()> fired)
      : fired_(std::move(fired)), timer_(queue->context()), ended_(this, &Timer::OnEnd) {}
  void Start(std::chrono::milliseconds period) {
    timer_.expires_after(period);
    timer_.async_wait(IoQueue::Handler(&ended_));
  }
  void Cancel() { timer_.cancel(); }

 private:
  void OnEnd(error_code, size_t) { fired_(); }

  const std::function<void()> fired_;
  asio::steady_timer timer_;
  Operation<Timer> ended_;
};

}  // namespace gradwire::transport::tcp

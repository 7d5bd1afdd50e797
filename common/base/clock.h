// Time as a dependency: state machines are told what time it is, so that a simulator can drive them.
#pragma once

#include <chrono>
#include <cstdint>

namespace gradwire {

// Nanoseconds on a monotonic clock whose zero is arbitrary.
using TimeNs = int64_t;

// Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual TimeNs Now() = 0;
};

class SteadyClock final : public Clock {
 public:
  TimeNs Now() override {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
};

}  // namespace gradwire

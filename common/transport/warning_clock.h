// When a listener may say again that it refuses something: once in ten seconds.
#pragma once

#include <atomic>

#include "common/base/clock.h"

namespace gradwire::transport {

// Thread-safe.
class WarningClock {
 public:
  // True where nothing was admitted for so long.
  bool Admit(TimeNs now) {
    TimeNs next = next_.load();
    return now >= next && next_.compare_exchange_strong(next, now + kPauseNs);
  }

 private:
  static constexpr TimeNs kPauseNs = 10'000'000'000;

  std::atomic<TimeNs> next_ = 0;
};

}  // namespace gradwire::transport

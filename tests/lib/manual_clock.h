// A clock that stands still until a test moves it.
#pragma once

#include <atomic>

#include "common/base/clock.h"

namespace gradwire::testing_support {

// Thread-safe.
class ManualClock final : public Clock {
 public:
  explicit ManualClock(TimeNs start = 1) : now(start) {}
  TimeNs Now() override { return now; }
  std::atomic<TimeNs> now;
};

}  // namespace gradwire::testing_support

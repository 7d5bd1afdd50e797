// How long a caller of a session waits.
#pragma once

#include <cstdint>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace gradwire::client {

// Negative: for ever.
inline absl::Time DeadlineOf(int64_t timeout_ms) {
  return timeout_ms < 0 ? absl::InfiniteFuture() : absl::Now() + absl::Milliseconds(timeout_ms);
}

}  // namespace gradwire::client

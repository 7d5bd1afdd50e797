// See coalescing.h.
#include "client/cpp/internal/coalescing.h"

#include <algorithm>

namespace gradwire::client {

void Coalescing::RoundBegan(TimeNs now, bool all_acknowledged) {
  const bool soon = all_acknowledged && (acknowledged_ - last_) * kSoon <= now - began_;
  most_bytes_ = scarce_ && soon ? std::min(most_bytes_ + kStepBytes, kMostBytes) : most_bytes_ * 3 / 4;
  began_ = now;
  scarce_ = false;
}

void Coalescing::FirstReady(TimeNs now) {
  first_ = now;
  thread_ = std::this_thread::get_id();
  delay_ = run_delay_();
}

void Coalescing::LastReady(TimeNs now) {
  last_ = acknowledged_ = now;
  const std::optional<TimeNs> delay = thread_ == std::this_thread::get_id() && delay_ ? run_delay_() : std::nullopt;
  scarce_ = delay && *delay > *delay_ && (*delay - *delay_) * kScarce >= now - first_;
}

}  // namespace gradwire::client

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
  times_ = run_times_();
}

void Coalescing::LastReady(TimeNs now) {
  last_ = acknowledged_ = now;
  if (!times_ || thread_ != std::this_thread::get_id()) return;
  const std::optional<RunTimes> times = run_times_();
  if (!times) return;
  const TimeNs took = now - first_, delayed = times->delayed - times_->delayed, ran = times->ran - times_->ran;
  scarce_ = delayed > 0 && delayed * kScarce >= took && (ran + delayed) * kBusy >= took;
}

}  // namespace gradwire::client

// See sync_patience.h.
#include "server/replication/sync_patience.h"

#include <algorithm>

namespace gradwire {

bool SyncPatience::MayBegin(TimeNs now) const {
  absl::MutexLock lock(&mu_);
  return now >= ends_;
}

TimeNs SyncPatience::Lost(TimeNs now, TimeNs since, TimeNs held) {
  absl::MutexLock lock(&mu_);
  held = std::clamp<TimeNs>(held, 0, kLongestPause);
  const TimeNs well = now - held - since;
  if (well >= kPausesToForget * pause_) pause_ = 0;
  pause_ = std::clamp(std::max(kPausePerHeld * held, 2 * pause_), kLeastPause, kLongestPause);
  ends_ = std::max(ends_, now + pause_);
  return pause_;
}

}  // namespace gradwire

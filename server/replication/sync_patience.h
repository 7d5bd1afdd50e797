// When rounds may begin to wait for a standby. They wait for one that is in sync until it is given up, so one that
// comes into sync and falls silent, again and again, could hold them for most of the time: after each that was lost,
// nobody is waited for during a pause that is many times as long as rounds were held, and that doubles. Contract:
// proto/REPLICATION.md, "In sync".
#pragma once

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/base/clock.h"

namespace gradwire {

// Thread-safe; reads no clock. One for all standbys of a server: who they are is not known.
class SyncPatience {
 public:
  static constexpr TimeNs kLeastPause = 100'000'000;
  static constexpr TimeNs kLongestPause = 600'000'000'000;
  static constexpr int64_t kPausePerHeld = 10;  // so that rounds are held for less than a tenth of the time
  // A standby that was in sync for so many pauses without holding rounds makes up for those that were lost before.
  static constexpr int64_t kPausesToForget = 10;

  // Rounds may begin to wait for a standby.
  bool MayBegin(TimeNs now) const;
  // A standby that rounds waited for is gone: in sync since `since`, and waited for during `held` at the end. How long
  // the pause is.
  TimeNs Lost(TimeNs now, TimeNs since, TimeNs held);

 private:
  mutable absl::Mutex mu_;
  TimeNs pause_ ABSL_GUARDED_BY(mu_) = 0;  // the last one
  TimeNs ends_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace gradwire

// Keeps one misbehaving worker from filling the log: of each kind of warning the first is written, the others of the
// next ten seconds are counted.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "common/base/clock.h"

namespace gradwire {

// Thread-safe; reads no clock and writes no log. Holds one entry per status code that was seen lately.
class WarningLimiter {
 public:
  static constexpr TimeNs kWindowNs = 10'000'000'000;

  struct Count {
    absl::StatusCode kind;
    uint64_t warnings;
  };

  // True: the caller writes this warning, and its window begins. False: the warning was counted.
  bool Admit(absl::StatusCode kind, TimeNs now);
  // The counts of windows that have ended, each once. A window in which something was counted is followed by another
  // one; otherwise the next warning of its kind is a first one again.
  std::vector<Count> TakeEnded(TimeNs now);

 private:
  struct Window {
    TimeNs end = 0;
    uint64_t counted = 0;
  };
  absl::Mutex mu_;
  std::map<absl::StatusCode, Window> windows_ ABSL_GUARDED_BY(mu_);
};

}  // namespace gradwire

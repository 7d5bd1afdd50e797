// Work that nobody waits for, done with time that others do not miss.
#pragma once

#include <functional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace gradwire {

// Thread-safe. Two things keep the work out of the others' way: its priority is the lowest (nice 19), and it takes at
// most a share of one core: where two hardware threads share a core, or all share the memory's bandwidth, even work of
// the lowest priority slows the rest down.
class BackgroundWork {
 public:
  // Returns body(), run on a thread of its own while this one waits. `body` takes no lock that a thread of usual
  // priority may want: it would hold it for as long as it is kept from running. Errors: those of `body`;
  // ResourceExhausted where it runs out of memory (the message begins with `what`) or no thread can be had.
  absl::Status Run(const char* what, const std::function<absl::Status()>& body);
  // Somebody waits after all: from here on Rest does not sleep.
  void Hurry();
  // Nobody wants the result any more: from here on Rest returns Cancelled.
  void Cancel();

  // To be called by bodies between pieces of work of about a millisecond: sleeps as long as the share demands.
  // Cancelled: the body should end. Returns ok at once on any other thread.
  static absl::Status Rest();

 private:
  absl::Status Sleep();
  bool MayGoOn() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return hurry_ || cancelled_; }

  absl::Mutex mu_;
  bool hurry_ ABSL_GUARDED_BY(mu_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace gradwire

// How long a thread should busy-wait before it blocks. Waking a blocked thread takes tens of microseconds, longer than
// many an answer does; but a thread that busy-waits takes the CPU from those that have work.
#pragma once

#include <algorithm>
#include <thread>

#include "common/base/clock.h"

namespace gradwire {

// Whether busy-waiting pays is judged by the waits before: each that was short earns credit, each that outlasted its
// busy-waiting costs kCost of it. So in the long run at most 1 / kCost of the limit is wasted per wait, and a thread
// whose waits are all long blocks at once. Not thread-safe.
class SpinBudget {
 public:
  // `limit_ns`: of one wait; 0: never busy-wait.
  explicit SpinBudget(TimeNs limit_ns) : limit_ns_(limit_ns) {}

  // For the wait that begins; 0: block.
  TimeNs budget_ns() const { return credit_ >= kCost ? limit_ns_ : 0; }

  // A wait that began with budget_ns() has ended after `waited_ns`.
  void Note(TimeNs waited_ns) {
    if (budget_ns() > 0 && waited_ns > budget_ns()) {
      credit_ -= kCost;
    } else if (waited_ns <= kShort * limit_ns_) {
      credit_ = std::min(credit_ + 1, kMaxCredit);
    }
  }

  // Calls `attempt` until it returns true, or for budget_ns. False: the budget is used up.
  template <typename Attempt>
  static bool Spin(TimeNs budget_ns, Attempt attempt) {
    const TimeNs begin = budget_ns > 0 ? SteadyClock().Now() : 0;
    for (int i = 1; budget_ns > 0 && SteadyClock().Now() - begin < budget_ns; ++i) {
      if (attempt()) return true;
      if (i % kAttemptsPerYield == 0) std::this_thread::yield();
    }
    return false;
  }

 private:
  static constexpr int kCost = 8;
  static constexpr int kMaxCredit = 64;
  // Waits of a blocked thread count as short up to so many limits: they contain the time of waking it, and its peer.
  static constexpr int kShort = 3;
  // So that who is waited for, if it shares the core, gets it within some 16 us.
  static constexpr int kAttemptsPerYield = 16;

  const TimeNs limit_ns_;
  int credit_ = 0;
};

}  // namespace gradwire

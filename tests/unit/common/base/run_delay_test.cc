// Against threads that share a core: what one of them waited is what the other one had.
#include "common/base/run_delay.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <thread>

namespace gradwire {
namespace {

constexpr TimeNs kMs = 1'000'000;

bool KeepToOneCore() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  const int core = sched_getcpu();
  if (core < 0) return false;
  CPU_SET(static_cast<size_t>(core), &cores);
  return sched_setaffinity(0, sizeof(cores), &cores) == 0;
}

void WorkFor(TimeNs time, const std::atomic<bool>* stop) {
  SteadyClock clock;
  const TimeNs begin = clock.Now();
  while (clock.Now() - begin < time && !*stop) {
  }
}

TEST(RunDelay, IsWhatAnotherThreadHadTheCore) {
  std::thread([] {  // this thread stays where it is
    if (!RunDelayOfThisThread() || !KeepToOneCore()) GTEST_SKIP() << "the kernel does not say, or allow";
    std::atomic<bool> stop = false;
    std::thread other([&] { WorkFor(60'000 * kMs, &stop); });  // inherits the core
    const TimeNs before = *RunDelayOfThisThread();
    WorkFor(400 * kMs, &stop);
    const TimeNs delay = *RunDelayOfThisThread() - before;
    stop = true;
    other.join();
    EXPECT_GE(delay, 40 * kMs) << "two take turns";
    EXPECT_LE(delay, 100'000 * kMs);
  })
      .join();
}

TEST(RunDelay, DoesNotGrowWhileItSleeps) {
  const auto before = RunDelayOfThisThread();
  if (!before) GTEST_SKIP() << "the kernel does not say";
  EXPECT_GE(*before, 0);
  for (int i = 0; i < 3; ++i) EXPECT_GE(RunDelayOfThisThread().value(), *before);
}

}  // namespace
}  // namespace gradwire

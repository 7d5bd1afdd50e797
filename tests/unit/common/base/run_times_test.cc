// Against threads that share a core: what one of them waited is what the other one had.
#include "common/base/run_times.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

namespace gradwire {
namespace {

constexpr TimeNs kMs = 1'000'000;
constexpr TimeNs kHangs = 120'000 * kMs;

bool KeepToOneCore() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  const int core = sched_getcpu();
  if (core < 0) return false;
  CPU_SET(static_cast<size_t>(core), &cores);
  return sched_setaffinity(0, sizeof(cores), &cores) == 0;
}

TEST(RunTimes, IsWhatAnotherThreadHadTheCore) {
  std::thread([] {  // this thread stays where it is
    if (!RunTimesOfThisThread() || !KeepToOneCore()) GTEST_SKIP() << "the kernel does not say, or allow";
    std::atomic<bool> stop = false;
    std::thread other([&] {  // inherits the core
      while (!stop) {
      }
    });
    SteadyClock clock;
    const TimeNs begin = clock.Now(), before = RunTimesOfThisThread()->delayed;
    const TimeNs ran = RunTimesOfThisThread()->ran;
    TimeNs delay = 0;
    while (delay < 40 * kMs && clock.Now() - begin < kHangs) delay = RunTimesOfThisThread()->delayed - before;
    const TimeNs took = clock.Now() - begin;
    stop = true;
    other.join();
    EXPECT_GE(delay, 40 * kMs) << "two take turns";
    EXPECT_LE(delay, took);
    EXPECT_GT(RunTimesOfThisThread()->ran, ran) << "it had its turns";
  })
      .join();
}

TEST(RunTimes, IsNotWhatAThreadSlept) {
  const auto before = RunTimesOfThisThread();
  if (!before) GTEST_SKIP() << "the kernel does not say";
  EXPECT_GE(before->delayed, 0);
  EXPECT_GT(before->ran, 0);
  // Machines are busy, but not through all of these.
  TimeNs least = kHangs;
  for (int i = 0; i < 20 && least > 20 * kMs; ++i) {
    const TimeNs asleep = RunTimesOfThisThread()->delayed;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    least = std::min(least, RunTimesOfThisThread()->delayed - asleep);
  }
  EXPECT_GE(least, 0);
  EXPECT_LE(least, 20 * kMs);
}

}  // namespace
}  // namespace gradwire

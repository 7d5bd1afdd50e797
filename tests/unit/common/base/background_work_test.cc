#include "common/base/background_work.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <new>
#include <thread>

namespace gradwire {
namespace {

double CpuSeconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

struct Spent {
  double cpu = 0;
  double wall = 0;
};

// Works for `seconds` of CPU time, in pieces, resting between them.
Spent Work(double seconds) {
  const auto start = std::chrono::steady_clock::now();
  const double from = CpuSeconds();
  for (double rested = from; CpuSeconds() < from + seconds;) {
    if (CpuSeconds() < rested + 0.001) continue;
    EXPECT_EQ(BackgroundWork::Rest(), absl::OkStatus());
    rested = CpuSeconds();
  }
  return {CpuSeconds() - from, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()};
}

TEST(BackgroundWorkTest, ReturnsWhatTheBodyReturns) {
  BackgroundWork work;
  EXPECT_EQ(work.Run("it", [] { return absl::OkStatus(); }), absl::OkStatus());
  EXPECT_EQ(work.Run("it", [] { return absl::DataLossError("gone"); }), absl::DataLossError("gone"));
  const absl::Status no_memory = work.Run("it", []() -> absl::Status { throw std::bad_alloc(); });
  EXPECT_EQ(no_memory, absl::ResourceExhaustedError("it: out of memory"));
}

TEST(BackgroundWorkTest, HasTheLowestPriorityAndLeavesTheCallersAlone) {
  const auto priority = [] { return getpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid))); };
  const int before = priority();
  int inside = 0;
  BackgroundWork work;
  ASSERT_TRUE(work.Run("it",
                       [&] {
                         inside = priority();
                         return absl::OkStatus();
                       })
                  .ok());
  EXPECT_EQ(inside, 19);
  EXPECT_EQ(priority(), before);
}

TEST(BackgroundWorkTest, TakesAtMostItsShare) {
  BackgroundWork work;
  Spent spent;
  ASSERT_TRUE(work.Run("it",
                       [&] {
                         spent = Work(0.02);
                         return absl::OkStatus();
                       })
                  .ok());
  // The last piece has not been rested for.
  EXPECT_GE(spent.wall, 5 * (spent.cpu - 0.002));
}

// How often the thread slept in Rest, after work of `seconds`.
long Sleeps(double seconds) {
  const double from = CpuSeconds();
  while (CpuSeconds() < from + seconds) continue;
  rusage before{};
  rusage after{};
  getrusage(RUSAGE_THREAD, &before);
  EXPECT_EQ(BackgroundWork::Rest(), absl::OkStatus());
  getrusage(RUSAGE_THREAD, &after);
  return after.ru_nvcsw - before.ru_nvcsw;
}

TEST(BackgroundWorkTest, SleepsNoMoreOnceSomebodyWaits) {
  BackgroundWork work;
  long before = 0;
  long after = 0;
  ASSERT_TRUE(work.Run("it",
                       [&] {
                         before = Sleeps(0.005);
                         work.Hurry();
                         after = Sleeps(0.005);
                         return absl::OkStatus();
                       })
                  .ok());
  EXPECT_GT(before, 0);
  EXPECT_EQ(after, 0);
}

TEST(BackgroundWorkTest, EndsWhenTheResultIsNotWanted) {
  BackgroundWork work;
  work.Cancel();
  EXPECT_EQ(work.Run("it", [] { return BackgroundWork::Rest(); }).code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(BackgroundWork::Rest(), absl::OkStatus()) << "it is about that work alone";
}

TEST(BackgroundWorkTest, RestsNobodyElse) { EXPECT_EQ(Sleeps(0.005), 0); }

}  // namespace
}  // namespace gradwire

// When gradients may wait for each other, and how many.
#include "client/cpp/internal/coalescing.h"

#include <gtest/gtest.h>

#include <thread>

#include "tests/unit/client/coalesced.h"

namespace gradwire::client {
namespace {

constexpr TimeNs kMs = 1'000'000;
constexpr uint64_t kMiB = 1u << 20;
constexpr TimeNs kScarce = 20 * kMs, kFree = 19 * kMs;  // of 500 ms between the first gradient and the last
constexpr TimeNs kSoon = 31 * kMs, kLate = 32 * kMs;    // of the 1000 ms of a round

struct CoalescingTest : testing::Test {
  CoalescingTest() { ScriptedTimes::says = true; }
  // What may wait in the round behind these.
  uint64_t MostAfter(int rounds, TimeNs late, TimeNs delayed) {
    MakeRounds(rounds, late, delayed, &coalescing, &now);
    return Next();
  }
  uint64_t Next(bool all_acknowledged = true) {
    Coalescing next = coalescing;
    next.RoundBegan(now, all_acknowledged);
    return next.most_bytes();
  }
  Coalescing coalescing = Coalescing(&ScriptedTimes::Read);
  TimeNs now = 77 * kMs;
};

TEST_F(CoalescingTest, NothingAtFirst) {
  EXPECT_EQ(coalescing.most_bytes(), 0u);
  coalescing.RoundBegan(now, true);
  EXPECT_EQ(coalescing.most_bytes(), 0u);
}

TEST_F(CoalescingTest, MoreFromRoundToRoundWhereCoresAreScarce) {
  EXPECT_EQ(MostAfter(1, kSoon, kScarce), 1 * kMiB);
  EXPECT_EQ(MostAfter(1, kSoon, kScarce), 2 * kMiB);
  EXPECT_EQ(MostAfter(6, kSoon, kScarce), 8 * kMiB);
  EXPECT_EQ(MostAfter(9, 0, 499 * kMs), 8 * kMiB) << "no more than that";
}

TEST_F(CoalescingTest, LessTheNearerTheEndIs) {
  EXPECT_FALSE(coalescing.MayWait(0, 100 * kMiB)) << "none may";
  MakeRounds(5, kSoon, kScarce, &coalescing, &now);
  coalescing.RoundBegan(now, true);
  ASSERT_EQ(coalescing.most_bytes(), 5 * kMiB);
  EXPECT_TRUE(coalescing.MayWait(5 * kMiB - 1, 100 * kMiB));
  EXPECT_FALSE(coalescing.MayWait(5 * kMiB, 100 * kMiB));
  EXPECT_TRUE(coalescing.MayWait(3 * kMiB - 1, 3 * kMiB));
  EXPECT_FALSE(coalescing.MayWait(3 * kMiB, 3 * kMiB));
  EXPECT_TRUE(coalescing.MayWait(kMiB - 1, 1));
  EXPECT_FALSE(coalescing.MayWait(kMiB, 1));
}

TEST_F(CoalescingTest, NothingOnIdleCores) {
  EXPECT_EQ(MostAfter(5, kSoon, kFree), 0u);
  EXPECT_EQ(MostAfter(5, 0, 0), 0u);
  EXPECT_EQ(MostAfter(8, kSoon, kScarce), 8 * kMiB);
  EXPECT_EQ(MostAfter(1, kSoon, kFree), 6 * kMiB) << "for one round says little";
  EXPECT_EQ(MostAfter(80, kSoon, kFree), 0u);
}

TEST_F(CoalescingTest, NothingWhereTheThreadComputesLessThanHalfOfTheTime) {
  for (const TimeNs ran : {229 * kMs, 230 * kMs}) {
    ScriptedTimes::step = kScarce;
    ScriptedTimes::ran = ran;
    coalescing.RoundBegan(now, true);
    coalescing.FirstReady(now);
    coalescing.LastReady(now + 500 * kMs);
    now += 1000 * kMs;
    EXPECT_EQ(Next(), ran == 230 * kMs ? kMiB : 0u);
  }
}

TEST_F(CoalescingTest, NothingOnASlowNetwork) {
  EXPECT_EQ(MostAfter(5, kLate, kScarce), 0u);
  EXPECT_EQ(MostAfter(8, kSoon, kScarce), 8 * kMiB);
  EXPECT_EQ(MostAfter(1, kLate, kScarce), 6 * kMiB);
  EXPECT_EQ(MostAfter(2, 400 * kMs, kScarce), 27 * kMiB / 8);
  EXPECT_EQ(MostAfter(1, kSoon, kScarce), 35 * kMiB / 8);
  EXPECT_EQ(Next(/*all_acknowledged=*/false), 81 * kMiB / 32) << "the next round begins before";
  EXPECT_EQ(MostAfter(80, kLate, kScarce), 0u);
}

TEST_F(CoalescingTest, NothingWhereTheKernelDoesNotSay) {
  ScriptedTimes::says = false;
  EXPECT_EQ(MostAfter(5, kSoon, kScarce), 0u);
}

TEST_F(CoalescingTest, NothingWhereTheKernelSaysItOnlyOnce) {
  ScriptedTimes::step = ScriptedTimes::ran = 1000 * kMs;
  for (const bool first : {false, true}) {
    for (int i = 0; i < 5; ++i) {
      coalescing.RoundBegan(now, true);
      ScriptedTimes::says = first;
      coalescing.FirstReady(now);
      ScriptedTimes::says = !first;
      coalescing.LastReady(now + 1);
    }
    EXPECT_EQ(Next(), 0u);
  }
}

TEST_F(CoalescingTest, NothingWhereSeveralThreadsReport) {
  ScriptedTimes::step = kScarce;
  for (int i = 0; i < 5; ++i) {
    coalescing.RoundBegan(now, true);
    std::thread([this] { coalescing.FirstReady(now); }).join();
    coalescing.LastReady(now + 1);
    now += 1000 * kMs;
  }
  EXPECT_EQ(Next(), 0u);
}

TEST_F(CoalescingTest, RoundsWithoutGradientsSayNothing) {
  EXPECT_EQ(MostAfter(8, kSoon, kScarce), 8 * kMiB);
  for (int i = 0; i < 80; ++i) coalescing.RoundBegan(now += 1000 * kMs, true);
  EXPECT_EQ(coalescing.most_bytes(), 0u);
}

TEST_F(CoalescingTest, RoundsThatTakeNoTimeDoNot) {
  ScriptedTimes::step = 0;
  for (int i = 0; i < 5; ++i) {
    coalescing.RoundBegan(now, true);
    coalescing.FirstReady(now);
    coalescing.LastReady(now);
  }
  EXPECT_EQ(Next(), 0u);
}

}  // namespace
}  // namespace gradwire::client

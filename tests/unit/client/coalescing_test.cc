// When gradients may wait for each other, and how many.
#include "client/cpp/internal/coalescing.h"

#include <gtest/gtest.h>

#include "tests/unit/client/coalesced.h"

namespace gradwire::client {
namespace {

constexpr TimeNs kMs = 1'000'000;
constexpr uint64_t kMiB = 1u << 20;
constexpr TimeNs kScarce = 20 * kMs, kFree = 19 * kMs;  // of the 500 ms of making gradients
constexpr TimeNs kSoon = 31 * kMs, kLate = 32 * kMs;    // of the 1000 ms of a round

struct CoalescingTest : testing::Test {
  // What may wait in the round behind these.
  uint64_t MostAfter(int rounds, TimeNs late, TimeNs delayed) {
    MakeRounds(rounds, late, delayed, &coalescing, &now);
    Coalescing next = coalescing;
    next.RoundBegan(now);
    return next.most_bytes();
  }
  Coalescing coalescing;
  TimeNs now = 77 * kMs;
};

TEST_F(CoalescingTest, NothingAtFirst) {
  EXPECT_EQ(coalescing.most_bytes(), 0u);
  coalescing.RoundBegan(now);
  EXPECT_EQ(coalescing.most_bytes(), 0u);
}

TEST_F(CoalescingTest, MoreFromRoundToRoundWhereCoresAreScarce) {
  EXPECT_EQ(MostAfter(1, kSoon, kScarce), 1 * kMiB);
  EXPECT_EQ(MostAfter(1, kSoon, kScarce), 2 * kMiB);
  EXPECT_EQ(MostAfter(6, kSoon, kScarce), 8 * kMiB);
  EXPECT_EQ(MostAfter(9, 0, 499 * kMs), 8 * kMiB) << "no more than that";
}

TEST_F(CoalescingTest, NothingOnIdleCores) {
  EXPECT_EQ(MostAfter(5, kSoon, kFree), 0u);
  EXPECT_EQ(MostAfter(5, 0, 0), 0u);
  EXPECT_EQ(MostAfter(8, kSoon, kScarce), 8 * kMiB);
  EXPECT_EQ(MostAfter(1, kSoon, kFree), 4 * kMiB) << "for one round says little";
  EXPECT_EQ(MostAfter(23, kSoon, kFree), 0u);
}

TEST_F(CoalescingTest, NothingOnASlowNetwork) {
  EXPECT_EQ(MostAfter(5, kLate, kScarce), 0u);
  EXPECT_EQ(MostAfter(8, kSoon, kScarce), 8 * kMiB);
  EXPECT_EQ(MostAfter(1, kLate, kScarce), 4 * kMiB);
  EXPECT_EQ(MostAfter(1, 400 * kMs, kScarce), 2 * kMiB);
  EXPECT_EQ(MostAfter(1, kSoon, kScarce), 3 * kMiB);
}

TEST_F(CoalescingTest, RoundsWithoutGradientsSayNothing) {
  EXPECT_EQ(MostAfter(8, kSoon, kScarce), 8 * kMiB);
  for (int i = 0; i < 25; ++i) coalescing.RoundBegan(now += 1000 * kMs);
  EXPECT_EQ(coalescing.most_bytes(), 0u);
}

TEST_F(CoalescingTest, RoundsThatTakeNoTimeDoNot) {
  for (int i = 0; i < 5; ++i) {
    coalescing.RoundBegan(now);
    coalescing.GradientsMade(now, 0, 0);
  }
  coalescing.RoundBegan(now);
  EXPECT_EQ(coalescing.most_bytes(), 0u);
}

}  // namespace
}  // namespace gradwire::client

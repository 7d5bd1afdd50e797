// Tests of SpinBudget: who busy-waits, and how much of it may be wasted.
#include "common/base/spin_budget.h"

#include <gtest/gtest.h>

namespace gradwire {
namespace {

constexpr TimeNs kLimit = 100'000;
constexpr TimeNs kQuick = 20'000;
constexpr TimeNs kSlow = 10'000'000;

// Waits of `waited_ns`, of which the thread busy-waits at most the budget: how much of that was in vain.
TimeNs Wasted(SpinBudget& spin, int waits, TimeNs waited_ns) {
  TimeNs wasted = 0;
  for (int i = 0; i < waits; ++i) {
    if (waited_ns > spin.budget_ns()) wasted += spin.budget_ns();
    spin.Note(waited_ns);
  }
  return wasted;
}

TEST(SpinBudget, BlocksUntilWaitsHaveProvenShort) {
  SpinBudget spin(kLimit);
  EXPECT_EQ(spin.budget_ns(), 0);
  Wasted(spin, 100, kQuick);
  EXPECT_EQ(spin.budget_ns(), kLimit);
}

TEST(SpinBudget, StopsWhereWaitsAreLong) {
  SpinBudget spin(kLimit);
  Wasted(spin, 1000, kQuick);
  EXPECT_GT(Wasted(spin, 100, kSlow), 0);
  EXPECT_EQ(spin.budget_ns(), 0);
  EXPECT_EQ(Wasted(spin, 100, kSlow), 0);
}

TEST(SpinBudget, SurvivesAPauseBetweenBursts) {
  SpinBudget spin(kLimit);
  for (int burst = 0; burst < 10; ++burst) {
    Wasted(spin, 20, kQuick);
    EXPECT_EQ(spin.budget_ns(), kLimit);
    Wasted(spin, 1, kSlow);
  }
}

TEST(SpinBudget, WastesAnEighthWhereWaitsAreJustTooLong) {
  SpinBudget spin(kLimit);
  EXPECT_LE(Wasted(spin, 9000, kLimit + kQuick), 1000 * kLimit);
}

TEST(SpinBudget, NeverSpinsWithoutALimit) {
  SpinBudget spin(0);
  Wasted(spin, 100, 0);
  EXPECT_EQ(spin.budget_ns(), 0);
}

TEST(SpinBudget, SpinEndsWithTheAttemptOrTheBudget) {
  int attempts = 0;
  EXPECT_TRUE(SpinBudget::Spin(kSlow * 1000, [&] { return ++attempts == 50; }));
  EXPECT_EQ(attempts, 50);
  EXPECT_FALSE(SpinBudget::Spin(kQuick, [] { return false; }));
  EXPECT_FALSE(SpinBudget::Spin(0, [] { return true; }));
}

}  // namespace
}  // namespace gradwire

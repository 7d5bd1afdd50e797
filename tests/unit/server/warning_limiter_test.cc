#include "server/job/warning_limiter.h"

#include <gtest/gtest.h>

namespace gradwire {
namespace {

constexpr TimeNs kWindow = WarningLimiter::kWindowNs;
constexpr absl::StatusCode kA = absl::StatusCode::kInvalidArgument;
constexpr absl::StatusCode kB = absl::StatusCode::kDataLoss;

TEST(WarningLimiter, WritesTheFirstOfEachKindAndCountsTheRest) {
  WarningLimiter limiter;
  EXPECT_TRUE(limiter.Admit(kA, 5));
  EXPECT_FALSE(limiter.Admit(kA, 6));
  EXPECT_TRUE(limiter.Admit(kB, 7));
  EXPECT_FALSE(limiter.Admit(kA, 4 + kWindow));
  EXPECT_TRUE(limiter.TakeEnded(4 + kWindow).empty());
  const auto ended = limiter.TakeEnded(5 + kWindow);
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended[0].kind, kA);
  EXPECT_EQ(ended[0].warnings, 2u);
  EXPECT_TRUE(limiter.TakeEnded(5 + kWindow).empty()) << "told once";
}

TEST(WarningLimiter, AKindThatGoesOnIsOnlyCounted) {
  WarningLimiter limiter;
  EXPECT_TRUE(limiter.Admit(kA, 0));
  for (int window = 1; window <= 3; ++window) {
    EXPECT_FALSE(limiter.Admit(kA, window * kWindow - 1));
    ASSERT_EQ(limiter.TakeEnded(window * kWindow).size(), 1u);
  }
}

TEST(WarningLimiter, AfterAQuietWindowTheNextIsAFirst) {
  WarningLimiter limiter;
  EXPECT_TRUE(limiter.Admit(kA, 0));
  EXPECT_TRUE(limiter.TakeEnded(kWindow).empty());
  EXPECT_TRUE(limiter.Admit(kA, kWindow + 1));
  EXPECT_FALSE(limiter.Admit(kA, kWindow + 2));
}

}  // namespace
}  // namespace gradwire

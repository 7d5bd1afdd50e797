// Standbys that come into sync and are lost hold rounds for less and less of the time.
#include "server/replication/sync_patience.h"

#include <gtest/gtest.h>

namespace gradwire {
namespace {

constexpr TimeNs kSecond = 1'000'000'000;

TEST(SyncPatience, NobodyIsKeptOutBeforeSomebodyWasLost) { EXPECT_TRUE(SyncPatience().MayBegin(0)); }

TEST(SyncPatience, PauseIsLongAgainstWhatWasHeldAndDoubles) {
  SyncPatience patience;
  TimeNs now = 100 * kSecond, held_in_all = 0;
  TimeNs expected = 50 * kSecond;
  for (int loss = 0; loss < 8; ++loss) {
    ASSERT_TRUE(patience.MayBegin(now));
    const TimeNs since = now;
    now += 5 * kSecond;  // silent at once
    held_in_all += 5 * kSecond;
    const TimeNs pause = patience.Lost(now, since, 5 * kSecond);
    EXPECT_EQ(pause, expected);
    EXPECT_FALSE(patience.MayBegin(now + pause - 1));
    now += pause;
    expected = std::min(2 * expected, SyncPatience::kLongestPause);
  }
  EXPECT_LT(held_in_all * 50, now) << "of an hour, rounds were held for less than a fiftieth";
}

TEST(SyncPatience, StandbyThatIsStartedAgainWaitsBriefly) {
  SyncPatience patience;
  EXPECT_EQ(patience.Lost(kSecond, 0, 0), SyncPatience::kLeastPause);
  EXPECT_TRUE(patience.MayBegin(kSecond + SyncPatience::kLeastPause));
}

TEST(SyncPatience, OneThatWasInSyncForLongMakesUpForIt) {
  SyncPatience patience;
  TimeNs now = 0;
  TimeNs pause = 0;
  for (int loss = 0; loss < 4; ++loss) pause = patience.Lost(now, now, kSecond);
  ASSERT_EQ(pause, 80 * kSecond);
  now += pause;
  const TimeNs since = now;
  now += SyncPatience::kPausesToForget * pause;
  EXPECT_EQ(patience.Lost(now, since, 0), SyncPatience::kLeastPause);
}

TEST(SyncPatience, ImpossibleTimesAreBounded) {
  SyncPatience patience;
  EXPECT_EQ(patience.Lost(0, 0, INT64_MAX), SyncPatience::kLongestPause);
  EXPECT_EQ(patience.Lost(0, kSecond, -kSecond), SyncPatience::kLongestPause) << "no time passed";
}

}  // namespace
}  // namespace gradwire

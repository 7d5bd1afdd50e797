#include "server/stages/turn.h"

#include <gtest/gtest.h>

#include "tests/unit/server/test_job.h"

namespace gradwire {
namespace {

ClosedBucket Closed(uint32_t bucket, uint64_t round) {
  ClosedBucket closed;
  closed.close.bucket = bucket;
  closed.close.round = round;
  return closed;
}

TEST(Turn, LaterRoundsWaitUntilTheirsBegins) {
  testing_support::KeepingStage next;
  Turn turn(&next);
  turn.Pass(Closed(0, 0));
  turn.Pass(Closed(0, 2));
  turn.Pass(Closed(1, 1));
  turn.Pass(Closed(0, 3));
  turn.Pass(Closed(1, 2));
  ASSERT_EQ(next.passed.size(), 2u);
  EXPECT_EQ(next.passed[1].close.round, 1u);
  turn.Begin(2);
  ASSERT_EQ(next.passed.size(), 4u);
  EXPECT_EQ(next.passed[2].close.bucket, 0u);
  EXPECT_EQ(next.passed[3].close.bucket, 1u);
  turn.Pass(Closed(2, 2));
  EXPECT_EQ(next.passed.size(), 5u);
  turn.Begin(3);
  ASSERT_EQ(next.passed.size(), 6u);
  EXPECT_EQ(next.passed[5].close.round, 3u);
}

}  // namespace
}  // namespace gradwire

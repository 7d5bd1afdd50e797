#include "server/job/member_sessions.h"

#include <gtest/gtest.h>

namespace gradwire {
namespace {

TEST(MemberSessions, WhoWasReplacedIsKnownLongAfter) {
  MemberSessions sessions;
  EXPECT_TRUE(sessions.Is(1, 10)) << "nothing is known";
  sessions.Assign(1, 10);
  EXPECT_TRUE(sessions.Is(1, 10));
  EXPECT_FALSE(sessions.Is(1, 11));
  EXPECT_FALSE(sessions.WasReplaced(1, 10));
  sessions.Assign(1, 11);
  EXPECT_FALSE(sessions.Is(1, 10));
  EXPECT_TRUE(sessions.WasReplaced(1, 10));
  EXPECT_FALSE(sessions.WasReplaced(1, 11));
  EXPECT_FALSE(sessions.WasReplaced(1, 12)) << "it is the next one";
  EXPECT_FALSE(sessions.WasReplaced(2, 10)) << "another member";
}

TEST(MemberSessions, TheFirstToComeAreForgotten) {
  MemberSessions sessions;
  for (MemberId member = 0; member <= MemberSessions::kMostKnown; ++member) {
    sessions.Assign(member, 1);
    sessions.Assign(member, 2);
  }
  EXPECT_FALSE(sessions.WasReplaced(0, 1));
  EXPECT_TRUE(sessions.WasReplaced(1, 1));
  for (uint64_t session = 3; session <= 2 + MemberSessions::kMostReplaced; ++session) sessions.Assign(1, session);
  EXPECT_FALSE(sessions.WasReplaced(1, 1));
  EXPECT_TRUE(sessions.WasReplaced(1, 2));
}

}  // namespace
}  // namespace gradwire

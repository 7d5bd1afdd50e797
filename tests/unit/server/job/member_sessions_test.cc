#include "server/job/member_sessions.h"

#include <gtest/gtest.h>

namespace gradwire {
namespace {

bool Nobody(MemberId) { return false; }

// As a session that gets in.
void ComesIn(MemberSessions& sessions, MemberId member, uint64_t session) {
  sessions.Joined(member, session, Nobody);
  sessions.Attached(session);
}

TEST(MemberSessions, WhoWasReplacedIsKnownLongAfter) {
  MemberSessions sessions;
  EXPECT_TRUE(sessions.Is(1, 10)) << "nothing is known";
  ComesIn(sessions, 1, 10);
  EXPECT_TRUE(sessions.Is(1, 10));
  EXPECT_FALSE(sessions.Is(1, 11));
  EXPECT_FALSE(sessions.WasReplaced(1, 10));
  ComesIn(sessions, 1, 11);
  EXPECT_FALSE(sessions.Is(1, 10));
  EXPECT_TRUE(sessions.WasReplaced(1, 10));
  EXPECT_FALSE(sessions.WasReplaced(1, 11));
  EXPECT_FALSE(sessions.WasReplaced(1, 12)) << "it is the next one";
  EXPECT_FALSE(sessions.WasReplaced(2, 10)) << "another member";
  for (uint64_t session = 12; session <= 10 + MemberSessions::kMostReplaced; ++session) ComesIn(sessions, 1, session);
  EXPECT_TRUE(sessions.WasReplaced(1, 10));
  ComesIn(sessions, 1, 99);
  EXPECT_FALSE(sessions.WasReplaced(1, 10));
  EXPECT_TRUE(sessions.WasReplaced(1, 11));
}

TEST(MemberSessions, WhoOnlyJoinedHasTakenNobodysPlace) {
  MemberSessions sessions;
  ComesIn(sessions, 1, 10);
  sessions.Joined(1, 11, Nobody);
  EXPECT_FALSE(sessions.Is(1, 10));
  EXPECT_FALSE(sessions.WasReplaced(1, 10));
  ComesIn(sessions, 1, 10);
  EXPECT_FALSE(sessions.WasReplaced(1, 11));
}

TEST(MemberSessions, WhoGoesOnAsANewMemberHasTakenThePlaceOfTheOldOne) {
  MemberSessions sessions;
  ComesIn(sessions, 1, 10);
  sessions.Joined(1, 11, Nobody);  // too late to go on as it
  ComesIn(sessions, 2, 11);
  EXPECT_TRUE(sessions.WasReplaced(1, 10));
  EXPECT_FALSE(sessions.WasReplaced(2, 10));
}

TEST(MemberSessions, ThatTellNoNumberAreNeverReplaced) {
  MemberSessions sessions;
  ComesIn(sessions, 1, 0);
  ComesIn(sessions, 1, 11);
  EXPECT_FALSE(sessions.WasReplaced(1, 0));
}

TEST(MemberSessions, MembersAreRememberedOthersForAWhile) {
  MemberSessions sessions;
  const auto member = [](MemberId id) { return id == 0; };
  for (MemberId id = 0; id < 2; ++id) {
    ComesIn(sessions, id, 1);
    ComesIn(sessions, id, 2);
  }
  for (MemberId id = 2; id < 3 * MemberSessions::kMostKnown; ++id) sessions.Joined(id, 1, member);
  EXPECT_TRUE(sessions.WasReplaced(0, 1));
  EXPECT_FALSE(sessions.WasReplaced(1, 1));
  EXPECT_FALSE(sessions.Is(3 * MemberSessions::kMostKnown - 1, 2));
}

}  // namespace
}  // namespace gradwire

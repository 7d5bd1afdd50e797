#include "server/job/member_streams.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "tests/unit/server/recording_stream.h"

namespace gradwire {
namespace {

std::shared_ptr<Outbox> NewStream() {
  return std::make_shared<Outbox>(std::make_shared<testing_support::RecordingStream>());
}

TEST(MemberStreams, AllStreamsOfAMemberShareOneBudget) {
  MemberStreams streams(1000);
  const auto push = NewStream(), pull = NewStream(), other = NewStream();
  streams.Attach(1, push);
  streams.Attach(1, pull);
  streams.Attach(2, other);
  EXPECT_EQ(push->unsent(), pull->unsent());
  EXPECT_NE(push->unsent(), other->unsent());
  EXPECT_EQ(push->unsent()->limit_bytes(), 1000u);
  streams.Detach(1, push);
  EXPECT_EQ(streams.CountOf(1), 1u);
  EXPECT_TRUE(streams.Has(2));
  // What was left unread counts on while the member is one, and is forgotten with it.
  const auto again = NewStream();
  streams.Attach(1, again);
  EXPECT_EQ(again->unsent(), pull->unsent());
  streams.Forget(1);
  const auto anew = NewStream();
  streams.Attach(1, anew);
  EXPECT_NE(anew->unsent(), pull->unsent());
}

TEST(MemberStreams, OfThoseThatDepartedTheOldestAreGivenUp) {
  MemberStreams streams(1000);
  std::vector<std::shared_ptr<Outbox>> kept;
  MemberStreams::Streams unread;
  for (MemberId member = 0; member < MemberStreams::kMaxDeparted; ++member) {
    kept.push_back(NewStream());
    streams.Attach(member, kept.back());
    EXPECT_EQ(streams.Depart(member, &unread), MemberStreams::Streams{kept.back()});
    EXPECT_FALSE(streams.Has(member));
  }
  EXPECT_TRUE(unread.empty());
  kept[3] = nullptr;  // has closed: it needs no place any more
  kept.push_back(NewStream());
  streams.Attach(1000, kept.back());
  streams.Depart(1000, &unread);
  EXPECT_TRUE(unread.empty());
  kept.push_back(NewStream());
  streams.Attach(1001, kept.back());
  streams.Depart(1001, &unread);
  EXPECT_EQ(unread, MemberStreams::Streams{kept[0]});
}

TEST(MemberStreams, TakesAllOfAJobThatIsGone) {
  MemberStreams streams(1000);
  for (const MemberId member : {MemberId{1}, MemberId{1}, MemberId{2}}) streams.Attach(member, NewStream());
  EXPECT_EQ(streams.TakeAll().size(), 3u);
  EXPECT_FALSE(streams.Has(1));
}

}  // namespace
}  // namespace gradwire

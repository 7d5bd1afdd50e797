// Workers that are started again: which round they are in, and who waits for whom.
#include <gtest/gtest.h>

#include "tests/unit/server/joint_rounds_fixture.h"

namespace gradwire {
namespace {

class ReturnTest : public JointRoundsTest {
 protected:
  // Two workers that have made round 0.
  void Begin() {
    Make(1, 2);
    a_ = Join("a"), b_ = Join("b");
    Complete(a_.id, 0, 0);
    Complete(b_.id, 0, 0);
  }
  JointRounds::JoinOutcome a_, b_;
};

TEST_F(ReturnTest, NewIncarnationExpelsTheOldAtOnceAndOwesWhatThatOwed) {
  Make(1, 2);
  const auto a = Join("a");
  const auto b = Join("b");
  Complete(b.id, 0, 0);
  const auto again = Join("a", 2);
  ASSERT_EQ(actions_.lost.size(), 1u);
  EXPECT_EQ(actions_.lost[0].id, a.id);
  EXPECT_EQ(machine_->Classify(a.id, 0, 0).status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(actions_.close.empty()) << "the round has nothing of the old one, and waits for the new one";
  EXPECT_EQ(again.start_version, 0u);
  EXPECT_EQ(Complete(again.id, 0, 0), PushVerdict::kAccept);
  ASSERT_EQ(actions_.close.size(), 1u);
  EXPECT_EQ(actions_.close[0].contributors, 2u);
}

TEST_F(ReturnTest, NewIncarnationIsInTheNextRoundWhereTheOpenOneHasAFrameOfTheOld) {
  Make(2, 2);
  const auto a = Join("a");
  const auto b = Join("b");
  Complete(a.id, 0, 0);
  const auto again = Join("a", 2);
  EXPECT_EQ(again.start_version, 1u);
  Complete(b.id, 0, 0);
  EXPECT_EQ(actions_.close[0].contributors, 2u) << "what the old one contributed stays";
  Complete(b.id, 1, 0);
  EXPECT_EQ(actions_.close[0].contributors, 1u);
  EXPECT_EQ(machine_->round(), 1u);
  Complete(b.id, 0, 1);
  EXPECT_TRUE(actions_.close.empty());
}

TEST_F(ReturnTest, WhatIsStartedAgainAndAgainDoesNotKeepTheOthersInARound) {
  Make(1, 2);
  Join("a");
  const auto b = Join("b");
  Complete(b.id, 0, 0);
  EXPECT_EQ(Join("a", 2).start_version, 0u);
  EXPECT_EQ(Join("a", 3).start_version, 1u);
  EXPECT_EQ(machine_->round(), 1u);
  Complete(b.id, 0, 1);
  EXPECT_EQ(Join("a", 4).start_version, 1u);
  EXPECT_EQ(Join("a", 5).start_version, 2u);
  EXPECT_EQ(machine_->round(), 2u);
}

TEST_F(ReturnTest, NewIncarnationThatAsksForALaterRoundIsNotWaitedForBefore) {
  Make(1, 2);
  Join("a");
  const auto b = Join("b");
  Complete(b.id, 0, 0);
  Join("a", 2);
  EXPECT_EQ(machine_->round(), 0u);
  EXPECT_EQ(Join("a", 2, 1).start_version, 1u) << "another shard has begun the next round";
  EXPECT_EQ(machine_->round(), 1u);
}

TEST_F(ReturnTest, AJobThatAllHaveLeftGathersItsWorkersAgain) {
  Begin();
  machine_->Leave(a_.id, 0, &actions_);
  EXPECT_EQ(Complete(b_.id, 0, 1), PushVerdict::kAccept);
  EXPECT_EQ(machine_->round(), 2u) << "one that stays goes on";
  machine_->Leave(b_.id, 0, &actions_);
  const auto c = Join("c");
  EXPECT_EQ(c.start_version, 2u);
  EXPECT_TRUE(c.waiting_for_workers);
  EXPECT_EQ(Complete(c.id, 0, 2), PushVerdict::kAccept);
  EXPECT_EQ(machine_->round(), 2u) << "it waits for another one";
  const auto d = Join("d");
  EXPECT_EQ(d.start_version, 2u);
  EXPECT_EQ(Complete(d.id, 0, 2), PushVerdict::kAccept);
  EXPECT_EQ(machine_->round(), 3u);
}

TEST_F(ReturnTest, AJobWhoseWorkersWereAllLostWaitsALeaseForThemAll) {
  Begin();
  Complete(a_.id, 0, 1);
  machine_->Tick(kLease, &actions_);
  ASSERT_TRUE(machine_->membership().members().empty());
  const auto again = Join("b", 2, 0, 5 * kLease);
  EXPECT_EQ(again.start_version, 1u);
  EXPECT_TRUE(again.waiting_for_workers);
  Complete(again.id, 0, 1, 7, 5 * kLease);
  EXPECT_EQ(machine_->round(), 1u) << "it waits for a";
  const auto back = Join("a", 2, 0, 5 * kLease + 1);
  EXPECT_EQ(back.start_version, 2u) << "its frame is still there";
  ASSERT_EQ(actions_.close.size(), 1u);
  EXPECT_EQ(actions_.close[0].contributors, 2u);
  Complete(back.id, 0, 2, 7, 5 * kLease + 1);
  EXPECT_EQ(machine_->round(), 2u);
  Complete(again.id, 0, 2, 7, 5 * kLease + 1);
  EXPECT_EQ(machine_->round(), 3u);
}

TEST_F(ReturnTest, WhoIsBackWithoutAFrameInTheRoundMakesItWhereTheOtherHasOne) {
  Begin();
  Complete(b_.id, 0, 1);
  machine_->Tick(kLease, &actions_);
  EXPECT_EQ(Join("b", 2, 0, 5 * kLease).start_version, 2u) << "its frame is still there";
  EXPECT_EQ(machine_->round(), 1u);
  const auto back = Join("a", 2, 0, 5 * kLease + 1);
  EXPECT_EQ(back.start_version, 1u);
  Complete(back.id, 0, 1, 7, 5 * kLease + 1);
  ASSERT_EQ(actions_.close.size(), 1u);
  EXPECT_EQ(actions_.close[0].contributors, 2u);
}

// torchrun ends all of its workers and starts them again; each has its own time for that, leases their own end.
TEST_F(ReturnTest, LeasesMayEndBetweenTheReturnOfOneAndAnother) {
  Begin();
  const auto back = Join("a", 2, 0, kLease - 200);
  EXPECT_EQ(back.start_version, 1u);
  Complete(back.id, 0, 1, 7, kLease - 200);
  machine_->Tick(kLease, &actions_);
  EXPECT_EQ(machine_->round(), 1u) << "b's lease has ended, but nobody is left who was in an earlier round";
  const auto other = Join("b", 2, 0, kLease + 200);
  EXPECT_EQ(other.start_version, 1u);
  Complete(other.id, 0, 1, 7, kLease + 200);
  ASSERT_EQ(actions_.close.size(), 1u);
  EXPECT_EQ(actions_.close[0].contributors, 2u);
}

TEST_F(ReturnTest, OrBeforeTheReturnOfTheFirst) {
  Begin();
  machine_->Renew(b_.id, 200);
  machine_->Tick(kLease, &actions_);
  ASSERT_EQ(machine_->membership().members().size(), 1u) << "a's lease has ended";
  const auto back = Join("a", 2, 0, kLease + 100);
  EXPECT_EQ(back.start_version, 1u);
  Complete(back.id, 0, 1, 7, kLease + 100);
  machine_->Tick(kLease + 200, &actions_);
  EXPECT_EQ(machine_->round(), 1u) << "it waits for b";
  EXPECT_EQ(Join("b", 2, 0, kLease + 300).start_version, 1u);
}

TEST_F(ReturnTest, WhatLeftWithAnErrorIsBackInTheRoundToo) {
  Begin();
  machine_->Leave(b_.id, 0, &actions_);
  EXPECT_EQ(Join("b", 2).start_version, 1u);
  EXPECT_EQ(Join("a", 2).start_version, 1u);
}

TEST_F(ReturnTest, WhatCrashesWhileItWaitsForTheOthersHasOneFrameInTheRound) {
  Begin();
  machine_->Tick(kLease, &actions_);
  Complete(Join("b", 2, 0, 2 * kLease).id, 0, 1, 7, 2 * kLease);
  EXPECT_EQ(Join("b", 3, 0, 2 * kLease).start_version, 2u);
  const auto back = Join("a", 2, 0, 2 * kLease);
  Complete(back.id, 0, 1, 7, 2 * kLease);
  ASSERT_EQ(actions_.close.size(), 1u);
  EXPECT_EQ(actions_.close[0].contributors, 2u);
}

TEST_F(ReturnTest, AJobThatWentOnWithFewerWorkersWaitsForNoMoreOfThem) {
  Make(1, 3);
  const auto a = Join("a"), b = Join("b"), c = Join("c");
  for (const auto& worker : {a, b, c}) Complete(worker.id, 0, 0);
  machine_->Leave(c.id, 0, &actions_);
  machine_->Tick(kLease, &actions_);
  EXPECT_TRUE(Join("a", 2, 0, 9 * kLease).waiting_for_workers);
  EXPECT_FALSE(Join("b", 2, 0, 9 * kLease).waiting_for_workers);
  EXPECT_TRUE(machine_->open());
}

TEST_F(ReturnTest, AJoinThatIsRefusedBeginsNoWait) {
  Begin();
  machine_->Tick(kLease, &actions_);
  EXPECT_FALSE(machine_->Join("no name", 1, 0, true, 2 * kLease, &actions_).ok());
  EXPECT_EQ(machine_->NextTick(), std::nullopt);
  EXPECT_TRUE(Join("a", 2, 0, 9 * kLease).waiting_for_workers);
}

TEST_F(ReturnTest, WhoIsLostWhileItWaitsForTheOthersIsWaitedForOnceMore) {
  Begin();
  machine_->Tick(kLease, &actions_);
  Join("a", 2, 0, 2 * kLease);
  machine_->Tick(3 * kLease, &actions_);
  ASSERT_TRUE(machine_->membership().members().empty());
  const auto back = Join("a", 3, 0, 9 * kLease);
  EXPECT_TRUE(back.waiting_for_workers);
  Complete(back.id, 0, 1, 7, 9 * kLease);
  EXPECT_EQ(machine_->round(), 1u);
  EXPECT_EQ(Join("b", 2, 0, 9 * kLease).start_version, 1u);
}

TEST_F(ReturnTest, TheWaitLastsLongerByWhatTheServerSlept) {
  Begin();
  machine_->Tick(kLease, &actions_);
  Join("a", 2, 0, 2 * kLease);
  machine_->Excuse(100, 2 * kLease + 200);
  EXPECT_EQ(*machine_->NextTick(), 3 * kLease + 100);
  machine_->Excuse(5 * kLease, 7 * kLease);
  EXPECT_EQ(*machine_->NextTick(), 8 * kLease) << "no longer than a lease from now";
}

TEST_F(ReturnTest, NoLongerThanALease) {
  Begin();
  machine_->Tick(kLease, &actions_);
  const auto again = Join("b", 2, 0, 5 * kLease);
  EXPECT_TRUE(again.waiting_for_workers);
  Complete(again.id, 0, 1, 7, 5 * kLease);
  EXPECT_EQ(*machine_->NextTick(), 6 * kLease);
  machine_->Renew(again.id, 6 * kLease - 1);
  EXPECT_EQ(*machine_->NextTick(), 6 * kLease);
  machine_->Tick(6 * kLease - 1, &actions_);
  EXPECT_EQ(machine_->round(), 1u);
  machine_->Tick(6 * kLease, &actions_);
  EXPECT_EQ(machine_->round(), 2u);
  Complete(again.id, 0, 2, 7, 6 * kLease);
  EXPECT_EQ(machine_->round(), 3u) << "and nobody waits any more";
}

}  // namespace
}  // namespace gradwire

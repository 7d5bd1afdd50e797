// Every rule of rounds: who is waited for, what closes, what opens, what is answered to late and repeated frames.
#include "server/rounds/joint_rounds.h"

#include <gtest/gtest.h>

#include "tests/unit/server/joint_rounds_fixture.h"

namespace gradwire {
namespace {

TEST_F(JointRoundsTest, OpensWhenMinWorkersHaveJoinedAndAllStartAtZero) {
  Make(1, 2);
  const auto a = Join("a");
  EXPECT_TRUE(a.waiting_for_workers);
  EXPECT_FALSE(machine_->open());
  const auto b = Join("b");
  EXPECT_FALSE(b.waiting_for_workers);
  EXPECT_TRUE(machine_->open());
  EXPECT_EQ(actions_.opened, 0u);
  EXPECT_EQ(a.start_version, 0u);
  EXPECT_EQ(b.start_version, 0u);
}

TEST_F(JointRoundsTest, OpensOnlyOnceEveryBucketIsInitialized) {
  Make(2, 1, true);
  const auto a = Join("a");
  EXPECT_TRUE(a.must_initialize);
  EXPECT_FALSE(machine_->open());
  actions_ = {};
  machine_->Initialized(a.id, 0, 0, &actions_);
  EXPECT_FALSE(machine_->open());
  machine_->Initialized(a.id, 1, 0, &actions_);
  EXPECT_TRUE(machine_->open());
  EXPECT_FALSE(machine_->MustInitialize(a.id));
  EXPECT_EQ(machine_->CheckInitializer(a.id, 0).code(), absl::StatusCode::kAlreadyExists);
}

TEST_F(JointRoundsTest, NextJoinerInitializesWhenTheFirstIsLost) {
  Make(2, 1, true);
  const auto a = Join("a", 1, 0, 0);
  const auto b = Join("b", 1, 0, 10);
  EXPECT_FALSE(b.must_initialize);
  EXPECT_EQ(machine_->CheckInitializer(b.id, 0).code(), absl::StatusCode::kFailedPrecondition);
  machine_->Initialized(a.id, 0, 0, &actions_);
  actions_ = {};
  machine_->Tick(kLease, &actions_);
  ASSERT_EQ(actions_.lost.size(), 1u);
  EXPECT_TRUE(actions_.restart_initialization);
  EXPECT_TRUE(machine_->MustInitialize(b.id));
  EXPECT_TRUE(machine_->CheckInitializer(b.id, 0).ok());
}

TEST_F(JointRoundsTest, LeasesLastLongerByWhatTheServerSlept) {
  Make(2, 1, true);
  Join("a", 1, 0, 0);
  const TimeNs now = 3 * kLease;
  Join("b", 1, 0, now - 1);  // was heard when the server ran again, before it noticed that it had not
  machine_->Excuse(3 * kLease - 100, now);
  EXPECT_EQ(*machine_->NextTick(), 4 * kLease - 100);
  machine_->Tick(4 * kLease - 101, &actions_);
  EXPECT_TRUE(actions_.lost.empty());
  machine_->Tick(4 * kLease - 100, &actions_);
  ASSERT_EQ(actions_.lost.size(), 1u);
  EXPECT_EQ(actions_.lost[0].worker, "a");
  machine_->Tick(4 * kLease, &actions_);
  EXPECT_EQ(actions_.lost.size(), 2u) << "no longer than a lease from now";
}

TEST_F(JointRoundsTest, OnlyAMemberThatMayIsChosenToInitialize) {
  Make(1, 1, true);
  const auto a = Join("a", 1, 0, 0, false);
  EXPECT_FALSE(a.must_initialize);
  EXPECT_EQ(machine_->CheckInitializer(a.id, 0).code(), absl::StatusCode::kFailedPrecondition);
  const auto b = Join("b");
  EXPECT_TRUE(b.must_initialize);
  machine_->SetMayInitialize(a.id, true, &actions_);  // the chosen one stays
  EXPECT_FALSE(machine_->MustInitialize(a.id));
  EXPECT_FALSE(actions_.restart_initialization);
  machine_->SetMayInitialize(b.id, false, &actions_);  // it no longer may
  EXPECT_TRUE(machine_->MustInitialize(a.id));
  EXPECT_FALSE(Join("a", 1, 0, 0, false).must_initialize);  // the latest word counts
  EXPECT_TRUE(Join("b").must_initialize);
}

TEST_F(JointRoundsTest, BucketClosesWhenEveryMemberHasContributedAndRoundWhenEveryBucketHas) {
  Make(2, 2);
  const auto a = Join("a");
  const auto b = Join("b");
  EXPECT_EQ(Complete(a.id, 0, 0), PushVerdict::kAccept);
  EXPECT_TRUE(actions_.close.empty());
  EXPECT_EQ(Complete(b.id, 0, 0), PushVerdict::kAccept);
  ASSERT_EQ(actions_.close.size(), 1u);
  EXPECT_EQ(actions_.close[0].bucket, 0u);
  EXPECT_EQ(actions_.close[0].contributors, 2u);
  EXPECT_EQ(machine_->round(), 0u);
  Complete(b.id, 1, 0);
  Complete(a.id, 1, 0);
  EXPECT_EQ(machine_->round(), 1u);
  EXPECT_EQ(actions_.opened, 1u);
}

TEST_F(JointRoundsTest, RoundZeroWaitsForMinWorkersAgainWhereTheyAreLostBeforeAnythingCame) {
  Make(1, 2);
  const auto a = Join("a");
  const auto b = Join("b");
  ASSERT_TRUE(machine_->open());
  machine_->Leave(a.id, 0, &actions_);
  EXPECT_FALSE(machine_->open());
  machine_->Leave(b.id, 0, &actions_);
  const auto again = Join("a", 2);  // the first one that is back does not run round 0 alone
  EXPECT_TRUE(again.waiting_for_workers);
  EXPECT_EQ(again.start_version, 0u);
  EXPECT_EQ(Complete(again.id, 0, 0), PushVerdict::kAccept);
  EXPECT_TRUE(actions_.close.empty());
  const auto other = Join("b", 2);
  EXPECT_EQ(other.start_version, 0u);
  EXPECT_EQ(actions_.opened, 0u);
  Complete(other.id, 0, 0);
  ASSERT_EQ(actions_.close.size(), 1u);
  EXPECT_EQ(actions_.close[0].contributors, 2u);
}

TEST_F(JointRoundsTest, AWorkerThatIsStartedAnewBeforeAnythingCameIsInRoundZero) {
  Make(1, 2);
  const auto a = Join("a");
  Join("b", 1);
  const auto again = Join("b", 2);
  EXPECT_EQ(again.start_version, 0u);
  EXPECT_TRUE(machine_->open());
  Complete(a.id, 0, 0);
  EXPECT_TRUE(actions_.close.empty());
  Complete(again.id, 0, 0);
  EXPECT_EQ(actions_.close.size(), 1u);
}

TEST_F(JointRoundsTest, RoundZeroGoesOnWithoutALostWorkerOnceAFrameOfItHasCome) {
  Make(1, 2);
  const auto a = Join("a");
  const auto b = Join("b");
  Complete(a.id, 0, 0);
  machine_->Leave(b.id, 0, &actions_);
  EXPECT_EQ(machine_->round(), 1u);
  EXPECT_TRUE(machine_->open()) << "a later round does not wait for a worker that is lost";
  machine_->Leave(a.id, 0, &actions_);
  EXPECT_FALSE(machine_->open()) << "nobody is left: the next run gathers its workers";
}

TEST_F(JointRoundsTest, FramesBeforeRoundZeroOpensAreKept) {
  Make(1, 2);
  const auto a = Join("a");
  EXPECT_EQ(Complete(a.id, 0, 0), PushVerdict::kAccept);
  EXPECT_TRUE(actions_.close.empty());
  const auto b = Join("b");
  EXPECT_TRUE(actions_.close.empty());
  Complete(b.id, 0, 0);
  ASSERT_EQ(actions_.close.size(), 1u);
  EXPECT_EQ(actions_.close[0].contributors, 2u);
}

TEST_F(JointRoundsTest, AbstentionIsNotWaitedForAndCanBeReplaced) {
  Make(1, 2);
  const auto a = Join("a");
  const auto b = Join("b");
  actions_ = {};
  ASSERT_TRUE(machine_->Abstain(a.id, 0, 0, 0, &actions_).ok());
  EXPECT_TRUE(actions_.close.empty());
  EXPECT_EQ(Complete(a.id, 0, 0), PushVerdict::kAccept);
  actions_ = {};
  ASSERT_TRUE(machine_->Abstain(b.id, 0, 0, 0, &actions_).ok());
  ASSERT_EQ(actions_.close.size(), 1u);
  EXPECT_EQ(actions_.close[0].contributors, 1u);
}

TEST_F(JointRoundsTest, AllAbstainingClosesWithNobody) {
  Make(1, 1);
  const auto a = Join("a");
  actions_ = {};
  ASSERT_TRUE(machine_->Abstain(a.id, 0, 0, 0, &actions_).ok());
  ASSERT_EQ(actions_.close.size(), 1u);
  EXPECT_EQ(actions_.close[0].contributors, 0u);
  EXPECT_EQ(machine_->round(), 1u);
}

TEST_F(JointRoundsTest, JoinDuringARoundTakesEffectAtTheNext) {
  Make(1, 1);
  const auto a = Join("a");
  Complete(a.id, 0, 0);
  const auto b = Join("b");
  EXPECT_EQ(b.start_version, 2u);
  EXPECT_EQ(machine_->status().members, 1u);
  EXPECT_EQ(*machine_->Classify(b.id, 0, 1), PushVerdict::kNotIncluded);
  Complete(a.id, 0, 1);
  EXPECT_EQ(machine_->round(), 2u);
  EXPECT_EQ(machine_->status().members, 2u);
  Complete(a.id, 0, 2);
  EXPECT_TRUE(actions_.close.empty());
  Complete(b.id, 0, 2);
  EXPECT_EQ(actions_.close.size(), 1u);
}

TEST_F(JointRoundsTest, LeaseEndClosesTheRoundOverTheOthers) {
  Make(2, 2);
  const auto a = Join("a");
  const auto b = Join("b");
  Complete(a.id, 0, 0);
  Complete(a.id, 1, 0);
  Complete(b.id, 0, 0);
  machine_->Renew(a.id, 500);
  actions_ = {};
  machine_->Tick(kLease, &actions_);
  ASSERT_EQ(actions_.lost.size(), 1u);
  EXPECT_EQ(actions_.lost[0].worker, "b");
  ASSERT_EQ(actions_.close.size(), 1u);
  EXPECT_EQ(actions_.close[0].bucket, 1u);
  EXPECT_EQ(actions_.close[0].contributors, 1u);
  EXPECT_EQ(machine_->round(), 1u);
  EXPECT_EQ(machine_->Classify(b.id, 1, 0).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(JointRoundsTest, WhoPullsMeansAndIsRoundsBehindIsInALaterRound) {
  Make(1, 2);
  const auto a = Join("a");
  const auto b = Join("b");
  Complete(a.id, 0, 0);
  machine_->Renew(a.id, 500);
  machine_->Tick(kLease, &actions_);
  Complete(a.id, 0, 1);
  ASSERT_EQ(machine_->round(), 2u) << "without b";
  actions_ = {};
  const auto back = machine_->Resume("b", 1, {.round = 0}, kLease, &actions_);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->start_version, 2u);
  EXPECT_EQ(Complete(b.id, 0, 1), PushVerdict::kNotIncluded);
  Complete(a.id, 0, 2);
  Complete(a.id, 0, 3);
  EXPECT_EQ(machine_->round(), 3u) << "waits for b";
  EXPECT_EQ(Complete(b.id, 0, 2), PushVerdict::kNotIncluded);
  EXPECT_EQ(Complete(b.id, 0, 3), PushVerdict::kAccept);
  EXPECT_EQ(machine_->round(), 4u);
}

TEST_F(JointRoundsTest, CompleteFramesOfALostWorkerStayIncluded) {
  Make(1, 2);
  const auto a = Join("a");
  const auto b = Join("b");
  Complete(b.id, 0, 0);
  actions_ = {};
  machine_->Leave(b.id, 0, &actions_);
  EXPECT_TRUE(actions_.close.empty());
  Complete(a.id, 0, 0);
  ASSERT_EQ(actions_.close.size(), 1u);
  EXPECT_EQ(actions_.close[0].contributors, 2u);
}

TEST_F(JointRoundsTest, LateFrameIsNotIncluded) {
  Make(1, 1);
  const auto a = Join("a");
  const auto b = Join("b");
  Complete(a.id, 0, 0);
  EXPECT_EQ(machine_->round(), 1u);
  EXPECT_EQ(*machine_->Classify(b.id, 0, 0), PushVerdict::kNotIncluded);
  EXPECT_EQ(Complete(b.id, 0, 0), PushVerdict::kNotIncluded);
}

TEST_F(JointRoundsTest, RepeatIsADuplicateEvenAfterItsRoundHasClosed) {
  Make(1, 2);
  const auto a = Join("a");
  const auto b = Join("b");
  Complete(a.id, 0, 0, 11);
  EXPECT_EQ(*machine_->Classify(a.id, 0, 0), PushVerdict::kDuplicate);
  EXPECT_TRUE(machine_->Repeat(a.id, 0, 0, 11).ok());
  EXPECT_EQ(machine_->Repeat(a.id, 0, 0, 12).code(), absl::StatusCode::kFailedPrecondition);
  Complete(b.id, 0, 0, 13);
  EXPECT_EQ(machine_->round(), 1u);
  EXPECT_EQ(*machine_->Classify(a.id, 0, 0), PushVerdict::kDuplicate);
  EXPECT_EQ(machine_->Repeat(a.id, 0, 0, 12).code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(JointRoundsTest, RoundThatIsNotOpenIsRefusedNamingBoth) {
  Make(1, 1);
  const auto a = Join("a");
  const auto verdict = machine_->Classify(a.id, 0, 3);
  EXPECT_EQ(verdict.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(verdict.status().message().find("round 3"), absl::string_view::npos);
  EXPECT_NE(verdict.status().message().find("round 0"), absl::string_view::npos);
}

TEST_F(JointRoundsTest, RoundWithoutMembersStaysOpenAndTheNextJoinerEntersIt) {
  Make(2, 1);
  const auto a = Join("a");
  Complete(a.id, 0, 0);
  Complete(a.id, 1, 0);
  actions_ = {};
  machine_->Leave(a.id, 0, &actions_);
  EXPECT_TRUE(actions_.close.empty());
  EXPECT_EQ(machine_->round(), 1u);
  const auto b = Join("b");
  EXPECT_EQ(b.start_version, 1u);
  EXPECT_EQ(machine_->status().members, 1u);
}

// What a worker may send is bounded by max_workers, so that sums stay in range; workers that left are in them, too.
TEST_F(JointRoundsTest, ARoundTakesNoMoreFramesThanTheJobMayHaveWorkers) {
  Make(1, 2);
  for (int w = 0; w < 8; ++w) {
    const auto passing = Join("passing-" + std::to_string(w));
    EXPECT_EQ(Complete(passing.id, 0, 0), PushVerdict::kAccept);
    actions_ = {};
    machine_->Leave(passing.id, 0, &actions_);
  }
  const auto a = Join("a");
  EXPECT_EQ(Complete(a.id, 0, 0), PushVerdict::kNotIncluded);
  EXPECT_EQ(Complete(a.id, 0, 0), PushVerdict::kNotIncluded) << "a repeat gets the same answer";
  EXPECT_TRUE(actions_.close.empty());
  const auto b = Join("b");
  EXPECT_EQ(Complete(b.id, 0, 0), PushVerdict::kNotIncluded);
  ASSERT_EQ(actions_.close.size(), 1u) << "nobody is waited for";
  EXPECT_EQ(actions_.close[0].contributors, 8u);
  EXPECT_EQ(machine_->round(), 1u);
  EXPECT_EQ(Complete(a.id, 0, 1), PushVerdict::kAccept);
}

TEST_F(JointRoundsTest, RoundAbandonedHalfClosedIsFinishedForTheNextJoiner) {
  Make(2, 1);
  const auto a = Join("a");
  Complete(a.id, 0, 0);  // bucket 0 is at version 1 now, its version 0 is gone
  actions_ = {};
  machine_->Leave(a.id, 0, &actions_);
  EXPECT_TRUE(actions_.close.empty());
  const auto b = Join("b");
  EXPECT_EQ(b.start_version, 1u);
  ASSERT_EQ(actions_.close.size(), 1u);
  EXPECT_EQ(actions_.close[0].bucket, 1u);
  EXPECT_EQ(actions_.close[0].contributors, 0u);
  EXPECT_EQ(machine_->round(), 1u);
}

TEST_F(JointRoundsTest, JoinAgainWithALaterStartIsNotWaitedForBefore) {
  Make(1, 1);
  const auto a = Join("a");
  Complete(a.id, 0, 0);
  EXPECT_EQ(Join("b").start_version, 2u);
  EXPECT_EQ(Join("b", 1, 4).start_version, 4u);
  Complete(a.id, 0, 1);
  Complete(a.id, 0, 2);
  Complete(a.id, 0, 3);
  EXPECT_EQ(machine_->round(), 4u);
  EXPECT_EQ(machine_->status().members, 2u);
}

TEST_F(JointRoundsTest, LoneWorkerThatStartsLaterMovesTheRoundsForward) {
  Make(1, 1);
  Complete(Join("a").id, 0, 0);
  actions_ = {};
  machine_->Leave(MakeMemberId("a", 1), 0, &actions_);
  const auto b = Join("b", 1, 4);
  EXPECT_EQ(b.start_version, 4u);
  EXPECT_EQ(machine_->round(), 4u);
  EXPECT_EQ(actions_.close.size(), 3u);
}

// What `gradwire restore` leaves: a version without the contributions before it, and without workers.
TEST_F(JointRoundsTest, RestoredRoundGathersWorkers) {
  Make(1, 2);
  JointRounds::Recovered recovered;
  recovered.round = 5;
  recovered.versions = {5};
  recovered.known_from = 5;
  machine_->Restore(recovered, 0);
  const auto a = Join("a");
  EXPECT_EQ(a.start_version, 5u);
  EXPECT_TRUE(a.waiting_for_workers);
  Complete(a.id, 0, 5);
  EXPECT_EQ(machine_->round(), 5u);
  const auto b = Join("b");
  EXPECT_EQ(b.start_version, 5u);
  EXPECT_TRUE(machine_->open());
  Complete(b.id, 0, 5);
  EXPECT_EQ(machine_->round(), 6u);
}

// The versions behind 5 are others than those that were lost: what "b" has seen of them is not what is here.
TEST_F(JointRoundsTest, WhatWasLostIsNotTakenForWhatCameInItsPlace) {
  Make(1, 2);
  JointRounds::Recovered recovered;
  recovered.round = 5;
  recovered.versions = {5};
  recovered.workers = {{"a", 1}, {"b", 1}};
  machine_->Restore(recovered, 0);
  RoundActions actions;
  ASSERT_TRUE(machine_->Resume("a", 1, {.round = 5, .from_before = true}, 0, &actions).ok());
  machine_->Leave(MakeMemberId("b", 1), 0, &actions);
  for (uint64_t round = 5; round < 8; ++round) Complete(MakeMemberId("a", 1), 0, round);
  EXPECT_EQ(machine_->round(), 8u);
  EXPECT_EQ(machine_->Resume("b", 1, {.round = 7, .from_before = true}, 0, &actions).status().code(),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(machine_->Resume("b", 1, {.round = 5, .from_before = true, .seen = {0}}, 0, &actions).status().code(),
            absl::StatusCode::kDataLoss);
  EXPECT_TRUE(machine_->Resume("b", 1, {.round = 5, .from_before = true}, 0, &actions).ok());
  // Of this server's own versions there is nothing to doubt.
  EXPECT_TRUE(machine_->Resume("a", 1, {.round = 8, .seen = {0}}, 0, &actions).ok());
}

TEST_F(JointRoundsTest, StartTooFarAheadIsRefused) {
  Make(1, 1);
  RoundActions actions;
  EXPECT_EQ(machine_->Join("a", 1, JointRounds::kMaxRoundsAhead + 1, true, 0, &actions).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(JointRoundsTest, UnknownBucketAndStrangerAreRefused) {
  Make(1, 1);
  const auto a = Join("a");
  EXPECT_EQ(machine_->Classify(a.id, 1, 0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(machine_->Classify(42, 0, 0).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace gradwire

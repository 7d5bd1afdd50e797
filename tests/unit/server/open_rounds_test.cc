// Several open rounds at once (Rules::staleness): what may be pushed early, and that every bucket closes in order.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "server/rounds/joint_rounds.h"

namespace gradwire {
namespace {

class OpenRoundsTest : public testing::Test {
 protected:
  void Make(uint32_t buckets, uint32_t workers, uint32_t staleness) {
    JointRounds::Rules rules;
    rules.buckets = buckets;
    rules.min_workers = workers;
    rules.needs_initialization = false;
    rules.staleness = staleness;
    rules.membership = {.max_workers = 8, .lease_ns = 1000};
    machine_ = std::make_unique<JointRounds>(rules);
    ids_.clear();
    for (uint32_t w = 0; w < workers; ++w) {
      ids_.push_back(machine_->Join(std::string(1, static_cast<char>('a' + w)), 1, 0, false, 0, &actions_)->id);
    }
  }
  PushVerdict Push(uint32_t worker, uint32_t bucket, uint64_t round) {
    actions_ = {};
    return *machine_->Complete(ids_[worker], bucket, round, 7, 0, &actions_);
  }

  std::unique_ptr<JointRounds> machine_;
  RoundActions actions_;
  std::vector<MemberId> ids_;
};

TEST_F(OpenRoundsTest, AFastWorkerIsAheadByTheStalenessAndNoMore) {
  Make(1, 2, 2);
  for (uint64_t round = 0; round < 3; ++round) EXPECT_EQ(Push(0, 0, round), PushVerdict::kAccept);
  const absl::Status early = machine_->Classify(ids_[0], 0, 3).status();
  EXPECT_EQ(early.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(early.message().find("version 1 "), absl::string_view::npos) << early;
  for (uint64_t round = 0; round < 3; ++round) {
    Push(1, 0, round);
    ASSERT_EQ(actions_.close.size(), 1u);
    EXPECT_EQ(actions_.close[0].round, round);
    EXPECT_EQ(actions_.close[0].contributors, 2u);
    EXPECT_EQ(machine_->round(), round + 1);
  }
}

TEST_F(OpenRoundsTest, ABucketClosesInTheOrderOfItsRounds) {
  Make(1, 2, 1);
  Push(0, 0, 0);
  Push(0, 0, 1);
  EXPECT_EQ(Push(1, 0, 1), PushVerdict::kAccept);  // complete, but the round before is not
  EXPECT_TRUE(actions_.close.empty());
  Push(1, 0, 0);
  ASSERT_EQ(actions_.close.size(), 2u);
  EXPECT_EQ(actions_.close[0].round, 0u);
  EXPECT_EQ(actions_.close[1].round, 1u);
  EXPECT_EQ(machine_->round(), 2u);
}

TEST_F(OpenRoundsTest, LosingTheSlowWorkerClosesAllThatItHeldUp) {
  Make(2, 2, 2);
  for (uint64_t round = 0; round < 3; ++round) {
    for (uint32_t b = 0; b < 2; ++b) Push(0, b, round);
  }
  Push(1, 0, 0);
  actions_ = {};
  machine_->Leave(ids_[1], 0, &actions_);
  EXPECT_EQ(actions_.close.size(), 5u);
  EXPECT_EQ(machine_->round(), 3u);
}

TEST_F(OpenRoundsTest, ANewcomerStartsBehindTheRoundsThatHaveBegunToClose) {
  Make(2, 1, 2);
  Push(0, 0, 0);
  Push(0, 0, 1);
  EXPECT_EQ(machine_->NextBoundary(), 2u);
  EXPECT_EQ(machine_->Join("n", 1, 0, false, 0, &actions_)->start_version, 2u);
}

TEST_F(OpenRoundsTest, RestoredBucketsMayBeRoundsApart) {
  Make(2, 1, 2);
  JointRounds::Rules rules;
  rules.buckets = 2;
  rules.needs_initialization = false;
  rules.staleness = 2;
  rules.membership = {.max_workers = 8, .lease_ns = 1000};
  JointRounds machine(rules);
  machine.RestoreContribution(ids_[0], 0, 5, 50);
  machine.Restore({.round = 4, .versions = {6, 4}, .workers = {{"a", 1}}, .known_from = 0}, 0);
  EXPECT_EQ(machine.NextBoundary(), 6u);
  EXPECT_EQ(*machine.Classify(ids_[0], 0, 5), PushVerdict::kDuplicate);
  EXPECT_EQ(*machine.Classify(ids_[0], 0, 4), PushVerdict::kNotIncluded);
  EXPECT_EQ(*machine.Classify(ids_[0], 1, 4), PushVerdict::kAccept);
  EXPECT_EQ(*machine.Classify(ids_[0], 0, 6), PushVerdict::kAccept);
}

TEST_F(OpenRoundsTest, EveryVersionThatAWorkerHasSeenMustBeThere) {
  Make(2, 1, 2);
  machine_->Leave(ids_[0], 0, &actions_);
  machine_->Restore({.round = 4, .versions = {6, 4}, .workers = {{"a", 1}}, .known_from = 0}, 0);
  const auto resume = [this](uint64_t round, std::vector<uint32_t> seen) {
    return machine_->Resume("a", 1, {.round = round, .from_before = true, .seen = std::move(seen)}, 0, &actions_)
        .status();
  };
  EXPECT_TRUE(resume(4, {}).ok());
  EXPECT_TRUE(resume(4, {0, 0}).ok());
  EXPECT_TRUE(resume(3, {0, 0, 0, 1}).ok());
  EXPECT_EQ(resume(4, {0, 0, 0}).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(resume(4, {0, 0, 1}).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(resume(3, {1, 1}).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(resume(5, {}).code(), absl::StatusCode::kDataLoss);
}

TEST_F(OpenRoundsTest, WorkersMayAskForTheUpdatesOfAllThatTheyHadUnanswered) {
  Make(1, 1, 2);
  for (uint64_t round = 0; round < 6; ++round) Push(0, 0, round);
  for (uint64_t round = 0; round < 7; ++round) {
    EXPECT_EQ(machine_->MayAskFor(0, round), round >= 3 && round < 6) << round;
  }
}

// Any schedule closes every bucket in order, with every frame of every member.
TEST_F(OpenRoundsTest, EveryScheduleMergesEverything) {
  for (uint32_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    const uint32_t buckets = 1 + random() % 3;
    const uint32_t workers = 1 + random() % 4;
    const uint32_t staleness = random() % 4;
    Make(buckets, workers, staleness);
    std::vector<std::vector<uint64_t>> next(workers, std::vector<uint64_t>(buckets));
    std::vector<uint64_t> version(buckets);
    for (int step = 0; step < 400; ++step) {
      const uint32_t w = random() % workers;
      const uint32_t b = random() % buckets;
      const uint64_t lowest = *std::min_element(version.begin(), version.end());
      if (next[w][b] > lowest + staleness) continue;
      ASSERT_EQ(Push(w, b, next[w][b]++), PushVerdict::kAccept);
      for (const auto& close : actions_.close) {
        EXPECT_EQ(close.round, version[close.bucket]++);
        EXPECT_EQ(close.contributors, workers);
      }
      EXPECT_EQ(machine_->round(), *std::min_element(version.begin(), version.end()));
    }
    EXPECT_GT(machine_->round(), 1u);
  }
}

}  // namespace
}  // namespace gradwire

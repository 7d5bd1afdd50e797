// Asynchronous rounds: what is merged, when it is too old, what is known of frames that come again.
#include "server/rounds/async_rounds.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>

namespace gradwire {
namespace {

constexpr TimeNs kAsyncLease = 1000;

class AsyncRoundsTest : public testing::Test {
 protected:
  void Make(uint32_t buckets, uint32_t window, bool needs_initialization = false) {
    AsyncRounds::Rules rules;
    rules.buckets = buckets;
    rules.window = window;
    rules.needs_initialization = needs_initialization;
    rules.membership = {.max_workers = 8, .lease_ns = kAsyncLease};
    machine_ = std::make_unique<AsyncRounds>(rules);
  }
  MemberId Join(const std::string& worker, uint64_t incarnation = 1) {
    actions_ = {};
    const auto outcome = machine_->Join(worker, incarnation, 0, true, 0, &actions_);
    EXPECT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_EQ(outcome->start_version, 0u);
    return outcome->id;
  }
  PushVerdict Complete(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest = 7) {
    actions_ = {};
    const auto verdict = machine_->Complete(id, bucket, round, digest, 0, &actions_);
    EXPECT_TRUE(verdict.ok()) << verdict.status();
    return verdict.value_or(PushVerdict::kNotIncluded);
  }
  std::unique_ptr<AsyncRounds> machine_;
  RoundActions actions_;
};

TEST_F(AsyncRoundsTest, EveryFrameMakesAVersionOfItsBucketAlone) {
  Make(2, 4);
  const MemberId a = Join("a"), b = Join("b");
  EXPECT_EQ(Complete(a, 1, 0), PushVerdict::kAccept);
  ASSERT_EQ(actions_.close.size(), 1u);
  EXPECT_EQ(actions_.close[0].bucket, 1u);
  EXPECT_EQ(actions_.close[0].round, 0u);
  EXPECT_EQ(actions_.close[0].contributors, 1u);
  EXPECT_EQ(machine_->NextVersionOf(1), 1u);
  EXPECT_EQ(machine_->NextVersionOf(0), 0u);
  EXPECT_EQ(machine_->round(), 0u);
  EXPECT_EQ(Complete(b, 1, 1), PushVerdict::kAccept);
  EXPECT_EQ(actions_.close[0].round, 1u);
  EXPECT_EQ(actions_.close[0].contributions.at(b).round, 1u);
  EXPECT_EQ(Complete(a, 1, 1), PushVerdict::kAccept);  // both computed on version 1; this one makes version 3
  EXPECT_EQ(actions_.close[0].round, 2u);
}

TEST_F(AsyncRoundsTest, OnlyTheFirstFrameOfABucketCalibrates) {
  Make(1, 4);
  const MemberId a = Join("a"), b = Join("b");
  EXPECT_EQ(Complete(a, 0, 0), PushVerdict::kAccept);
  EXPECT_EQ(Complete(b, 0, 0), PushVerdict::kNotIncluded);
}

TEST_F(AsyncRoundsTest, FramesOlderThanTheWindowAreNotIncluded) {
  Make(1, 3);
  const MemberId a = Join("a"), b = Join("b");
  for (uint64_t version = 0; version < 4; ++version) ASSERT_EQ(Complete(a, 0, version), PushVerdict::kAccept);
  EXPECT_EQ(Complete(b, 0, 1), PushVerdict::kNotIncluded);
  EXPECT_TRUE(actions_.empty());
  EXPECT_EQ(Complete(b, 0, 2), PushVerdict::kAccept);
}

TEST_F(AsyncRoundsTest, FutureVersionsStrangersAndUnknownBucketsAreRefused) {
  Make(1, 3);
  const MemberId a = Join("a");
  const absl::Status future = machine_->Classify(a, 0, 5).status();
  EXPECT_EQ(future.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(future.message().find("version 5"), std::string::npos) << future;
  EXPECT_NE(future.message().find("version 0"), std::string::npos) << future;
  EXPECT_EQ(machine_->Classify(a, 1, 0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(machine_->Classify(a + 1, 0, 0).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(AsyncRoundsTest, ARepeatIsADuplicateAndOtherBytesAreRefused) {
  Make(1, 8);
  const MemberId a = Join("a"), b = Join("b");
  Complete(a, 0, 0, 10);
  Complete(b, 0, 1, 11);
  EXPECT_EQ(Complete(a, 0, 0, 10), PushVerdict::kDuplicate);
  EXPECT_EQ(machine_->Repeat(a, 0, 0, 12).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(machine_->NextVersionOf(0), 2u);
}

TEST_F(AsyncRoundsTest, LeasesLastLongerByWhatTheServerSlept) {
  Make(1, 8);
  Join("a");
  machine_->Excuse(kAsyncLease, kAsyncLease);
  machine_->Tick(2 * kAsyncLease - 1, &actions_);
  EXPECT_TRUE(actions_.lost.empty());
  machine_->Tick(2 * kAsyncLease, &actions_);
  EXPECT_EQ(actions_.lost.size(), 1u);
}

TEST_F(AsyncRoundsTest, KnowsTheFramesOfAWorkerThatWasAway) {
  Make(1, 8);
  const MemberId a = Join("a");
  Complete(a, 0, 0, 10);
  actions_ = {};
  machine_->Tick(kAsyncLease, &actions_);
  ASSERT_EQ(actions_.lost.size(), 1u);
  EXPECT_EQ(machine_->Classify(a, 0, 0).status().code(), absl::StatusCode::kNotFound);
  const auto back = machine_->Resume("a", 1, {.round = 0, .versions = {1}}, kAsyncLease, &actions_);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(*machine_->Classify(a, 0, 0), PushVerdict::kDuplicate);
  EXPECT_EQ(*machine_->Classify(a, 0, 1), PushVerdict::kAccept);
}

TEST_F(AsyncRoundsTest, RestoredMachineKnowsWhatTheJournalHas) {
  Make(2, 8);
  const MemberId a = MakeMemberId("a", 1);
  machine_->RestoreContribution(a, 0, 3, 30);
  Rounds::Recovered recovered;
  recovered.round = 2;
  recovered.versions = {5, 2};
  recovered.known_from = 2;
  machine_->Restore(recovered, 0);
  const Rounds::ResumePoint lost{.round = 0, .from_before = true, .versions = {6, 0}};
  EXPECT_EQ(machine_->Resume("a", 1, lost, 0, &actions_).status().code(), absl::StatusCode::kDataLoss);
  const Rounds::ResumePoint kept{.round = 0, .from_before = true, .versions = {5, 2}};
  ASSERT_TRUE(machine_->Resume("a", 1, kept, 0, &actions_).ok());
  EXPECT_EQ(*machine_->Classify(a, 0, 3), PushVerdict::kDuplicate);
  EXPECT_EQ(*machine_->Classify(a, 1, 2), PushVerdict::kAccept);
  // Of somebody of whom the journal says nothing, older frames may have been merged.
  ASSERT_TRUE(machine_->Resume("b", 1, {.round = 0, .from_before = true}, 0, &actions_).ok());
  EXPECT_EQ(machine_->Classify(MakeMemberId("b", 1), 0, 1).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(*machine_->Classify(MakeMemberId("b", 1), 0, 2), PushVerdict::kAccept);
}

TEST_F(AsyncRoundsTest, TakesNothingBeforeTheParametersAreThere) {
  Make(1, 8, /*needs_initialization=*/true);
  const MemberId a = Join("a"), b = Join("b");
  EXPECT_TRUE(machine_->MustInitialize(a));
  EXPECT_EQ(machine_->Classify(a, 0, 0).status().code(), absl::StatusCode::kFailedPrecondition);
  actions_ = {};
  machine_->Leave(a, 0, &actions_);
  EXPECT_TRUE(machine_->MustInitialize(b));
  machine_->Initialized(b, 0, 0, &actions_);
  EXPECT_TRUE(machine_->initialized());
  EXPECT_EQ(*machine_->Classify(b, 0, 0), PushVerdict::kAccept);
}

TEST_F(AsyncRoundsTest, NewIncarnationExpelsTheOld) {
  Make(1, 8);
  const MemberId old = Join("a", 1);
  Join("a", 2);
  ASSERT_EQ(actions_.lost.size(), 1u);
  EXPECT_EQ(actions_.lost[0].id, old);
  EXPECT_EQ(machine_->Resume("a", 1, {}, 0, &actions_).status().code(), absl::StatusCode::kFailedPrecondition);
}

// Workers of random speed that lose answers and come back: every frame is merged once or not included, versions have no
// gaps, and a merged frame is at most window - 1 versions old.
TEST(AsyncProperties, EveryFrameIsMergedOnceOrNotIncluded) {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    const auto below = [&random](uint32_t n) { return static_cast<uint32_t>(random() % n); };
    AsyncRounds::Rules rules;
    rules.buckets = 1 + below(3);
    rules.window = 1 + below(6);
    rules.needs_initialization = false;
    rules.membership = {.max_workers = 4, .lease_ns = kAsyncLease};
    AsyncRounds machine(rules);
    struct Worker {
      std::vector<uint64_t> on;  // per bucket: the version computed on
      std::vector<int> merged;   // -1: the frame is not answered
    };
    std::vector<Worker> workers(1 + below(4));
    std::map<std::tuple<size_t, uint32_t, uint64_t>, int> times;
    std::vector<uint64_t> next(rules.buckets);
    RoundActions actions;
    for (size_t w = 0; w < workers.size(); ++w) {
      workers[w] = {std::vector<uint64_t>(rules.buckets), std::vector<int>(rules.buckets)};
      ASSERT_TRUE(machine.Join(std::to_string(w), 1, 0, true, 0, &actions).ok());
    }
    for (int step = 0; step < 400; ++step) {
      const size_t w = below(static_cast<uint32_t>(workers.size()));
      const uint32_t b = below(rules.buckets);
      const MemberId id = MakeMemberId(std::to_string(w), 1);
      if (below(20) == 0) {  // away, and back
        machine.Tick(kAsyncLease, &actions);
        for (size_t other = 0; other < workers.size(); ++other) {
          const Rounds::ResumePoint point{.round = 0, .versions = workers[other].on};
          ASSERT_TRUE(machine.Resume(std::to_string(other), 1, point, 0, &actions).ok());
        }
      }
      actions = {};
      const uint64_t on = workers[w].on[b];
      const auto verdict = machine.Complete(id, b, on, static_cast<uint32_t>(on), 0, &actions);
      ASSERT_TRUE(verdict.ok()) << verdict.status();
      int& count = times[{w, b, on}];
      if (*verdict == PushVerdict::kAccept) {
        ASSERT_EQ(actions.close.size(), 1u);
        ASSERT_EQ(actions.close[0].round, next[b]++);
        ASSERT_LT(actions.close[0].round - on, rules.window);
        ++count;
      } else {
        ASSERT_TRUE(actions.close.empty());
      }
      ASSERT_EQ(count, *verdict == PushVerdict::kNotIncluded ? 0 : 1);
      if (below(3) == 0) continue;  // the answer is lost: the same frame comes again
      workers[w].on[b] = machine.NextVersionOf(b);
    }
  }
}

}  // namespace
}  // namespace gradwire

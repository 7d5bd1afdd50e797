// Rounds with a quorum: how long they wait for whom, what late workers are told, and how they come back.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "server/rounds/joint_rounds.h"
#include "server/rounds/lateness.h"
#include "server/rounds/push_history.h"

namespace gradwire {
namespace {

constexpr TimeNs kQuorumLease = 100'000;

class QuorumTest : public testing::Test {
 protected:
  void Make(uint32_t buckets, uint32_t workers, uint32_t quorum, double deviations = 6) {
    JointRounds::Rules rules;
    rules.buckets = buckets;
    rules.min_workers = workers;
    rules.needs_initialization = false;
    rules.quorum = quorum;
    rules.deviations = deviations;
    rules.membership = {.max_workers = 8, .lease_ns = kQuorumLease};
    machine_ = std::make_unique<JointRounds>(rules);
    for (uint32_t w = 0; w < workers; ++w) {
      const auto joined = machine_->Join(std::string(1, static_cast<char>('a' + w)), 1, 0, false, now_, &actions_);
      ids_.push_back(joined->id);
    }
  }
  PushVerdict Push(uint32_t worker, uint64_t round, uint32_t bucket = 0) {
    actions_ = {};
    auto verdict = machine_->Complete(ids_[worker], bucket, round, 7, now_, &actions_);
    EXPECT_TRUE(verdict.ok()) << verdict.status();
    if (verdict.ok() && *verdict == PushVerdict::kNotIncluded) machine_->NoteLate(ids_[worker], round, now_);
    machine_->Renew(ids_[worker], now_);
    return verdict.value_or(PushVerdict::kNotIncluded);
  }
  bool TickCloses() {
    actions_ = {};
    machine_->Tick(now_, &actions_);
    return !actions_.close.empty();
  }
  // Rounds in which the quorum takes 1000 and the last one comes `late` after it, until there is a deadline.
  uint64_t Learn(TimeNs late, uint32_t workers) {
    uint64_t round = machine_->round();
    for (size_t i = 0; i < Lateness::kFewest; ++i, ++round) {
      now_ += 1000;
      for (uint32_t w = 0; w + 1 < workers; ++w) Push(w, round);
      now_ += late;
      EXPECT_EQ(Push(workers - 1, round), PushVerdict::kAccept);
    }
    EXPECT_EQ(machine_->round(), round);
    return round;
  }

  std::unique_ptr<JointRounds> machine_;
  RoundActions actions_;
  std::vector<MemberId> ids_;
  TimeNs now_ = 0;
};

TEST_F(QuorumTest, WaitsForEverybodyUntilThereIsSomethingToLearnFrom) {
  Make(1, 4, 3);
  now_ = 1;
  for (uint32_t w = 0; w < 3; ++w) Push(w, 0);
  EXPECT_FALSE(machine_->status().deadline.has_value());
  now_ = kQuorumLease - 1;
  EXPECT_FALSE(TickCloses());
  EXPECT_EQ(*machine_->NextTick(), kQuorumLease);  // a lease, not a deadline
  now_ = kQuorumLease;
  EXPECT_TRUE(TickCloses());
}

TEST_F(QuorumTest, ClosesOverTheLateOneAtTheDeadlineAndNotBefore) {
  Make(1, 4, 3);
  const uint64_t round = Learn(100, 4);
  ASSERT_EQ(machine_->status().deadline, 100);  // they were all as late
  now_ += 1000;
  for (uint32_t w = 0; w < 3; ++w) Push(w, round);
  EXPECT_EQ(*machine_->NextTick(), now_ + 100);
  now_ += 99;
  EXPECT_FALSE(TickCloses());
  now_ += 1;
  ASSERT_TRUE(TickCloses());
  EXPECT_EQ(actions_.close[0].contributors, 3u);
  EXPECT_EQ(actions_.close[0].contributions.size(), 3u);
  EXPECT_EQ(machine_->status().short_rounds, 1u);
  EXPECT_EQ(Push(3, round), PushVerdict::kNotIncluded);
  EXPECT_EQ(machine_->round(), round + 1);
}

TEST_F(QuorumTest, ClosesAtOnceWhenTheLastOneCame) {
  Make(1, 4, 3);
  const uint64_t round = Learn(100, 4);
  for (uint32_t w = 0; w < 3; ++w) Push(w, round);
  EXPECT_TRUE(actions_.close.empty());
  EXPECT_EQ(Push(3, round), PushVerdict::kAccept);
  ASSERT_EQ(actions_.close.size(), 1u);
  EXPECT_EQ(actions_.close[0].contributors, 4u);
}

TEST_F(QuorumTest, AbstainingCountsAsHavingCome) {
  Make(1, 4, 3);
  const uint64_t round = Learn(100, 4);
  Push(0, round);
  Push(1, round);
  EXPECT_GT(*machine_->NextTick(), now_ + 100);
  actions_ = {};
  ASSERT_TRUE(machine_->Abstain(ids_[2], 0, round, now_, &actions_).ok());
  EXPECT_EQ(*machine_->NextTick(), now_ + 100);
  now_ += 100;
  ASSERT_TRUE(TickCloses());
  EXPECT_EQ(actions_.close[0].contributors, 2u);
}

TEST_F(QuorumTest, DeadlinesCountFromTheMomentAtWhichThoseWhoWereLostAreBack) {
  Make(1, 3, 2);
  const uint64_t round = Learn(100, 3);
  now_ += 2 * kQuorumLease;
  machine_->Tick(now_, &actions_);
  ASSERT_TRUE(machine_->membership().members().empty());
  const auto join = [&](uint32_t worker) {
    actions_ = {};
    ids_[worker] = machine_->Join(std::string(1, static_cast<char>('a' + worker)), 2, 0, false, now_, &actions_)->id;
  };
  for (uint32_t w = 0; w < 2; ++w) join(w);
  for (uint32_t w = 0; w < 2; ++w) Push(w, round);
  now_ += 5000;
  EXPECT_FALSE(TickCloses()) << "it waits for the third";
  join(2);
  EXPECT_TRUE(actions_.close.empty());
  EXPECT_EQ(*machine_->NextTick(), now_ + 100);
  EXPECT_EQ(Push(2, round), PushVerdict::kAccept);
}

TEST_F(QuorumTest, FewerMembersThanTheQuorumCloseWhenAllHaveCome) {
  Make(1, 4, 3);
  for (uint32_t w = 0; w < 4; ++w) Push(w, 0);
  for (uint32_t w = 2; w < 4; ++w) machine_->Leave(ids_[w], now_, &actions_);
  Push(0, 1);
  EXPECT_TRUE(actions_.close.empty());
  Push(1, 1);
  EXPECT_EQ(actions_.close.size(), 1u);
}

TEST_F(QuorumTest, WhoHasNotSentAnEarlierRoundIsNotWaitedFor) {
  Make(1, 4, 3);
  uint64_t round = Learn(100, 4);
  for (uint32_t w = 0; w < 3; ++w) Push(w, round);
  now_ += 100;
  ASSERT_TRUE(TickCloses());
  ++round;
  for (uint32_t w = 0; w < 3; ++w) Push(w, round);
  EXPECT_EQ(actions_.close.size(), 1u);
  // Heard of again, it is.
  EXPECT_EQ(Push(3, round - 1), PushVerdict::kNotIncluded);
  EXPECT_EQ(Push(3, round), PushVerdict::kNotIncluded);
  ++round;
  for (uint32_t w = 0; w < 3; ++w) Push(w, round);
  EXPECT_TRUE(actions_.close.empty());
}

TEST_F(QuorumTest, LateFramesTeachUntilTheRoundWouldTakeTwiceAsLong) {
  Make(1, 4, 3);
  uint64_t round = Learn(100, 4);
  EXPECT_EQ(machine_->status().deadline, 100);
  // The last one becomes slow for good. The others begin when a round opens, whenever it comes.
  const auto go = [&](int rounds, TimeNs late) {
    for (int i = 0; i < rounds; ++i, ++round) {
      now_ += 1000;
      for (uint32_t w = 0; w < 3; ++w) Push(w, round);
      const TimeNs quorum_at = now_;
      now_ = std::min(*machine_->NextTick(), quorum_at + late);
      const TimeNs closed_at = now_;
      if (now_ < quorum_at + late) {
        ASSERT_TRUE(TickCloses());
      }
      now_ = quorum_at + late;
      Push(3, round);
      now_ = closed_at;
    }
  };
  go(40, 400);
  EXPECT_EQ(machine_->status().deadline, 400);
  // Slower still: what is waited for is bounded by what the quorum takes.
  go(80, 5000);
  EXPECT_EQ(machine_->status().deadline, 1000);
}

TEST_F(QuorumTest, OneLongPauseIsAnOutlier) {
  Make(1, 4, 3);
  const uint64_t round = Learn(100, 4);
  for (uint32_t w = 0; w < 3; ++w) Push(w, round);
  now_ += 100;
  ASSERT_TRUE(TickCloses());
  now_ += 50'000;
  EXPECT_EQ(Push(3, round), PushVerdict::kNotIncluded);
  EXPECT_EQ(machine_->status().deadline, 100);
}

TEST_F(QuorumTest, DeadlineIsMedianAndDeviations) {
  Lateness lateness(2);
  const TimeNs late[] = {10, 20, 30, 40, 50, 60, 70, 80, 1000};
  for (uint64_t round = 0; round < 9; ++round) {
    EXPECT_EQ(lateness.Deadline().has_value(), round >= Lateness::kFewest);
    lateness.NoteQuorum(round, 0, 10'000);
    lateness.NoteLate(round, late[round]);
  }
  EXPECT_EQ(lateness.Deadline(), 50 + 2 * 20);  // deviations 40 30 20 10 0 10 20 30 950
}

TEST_F(QuorumTest, WorkerThatFellBehindIsNotWaitedForUntilItCatchesUp) {
  Make(1, 4, 0);
  Push(3, 0);
  for (uint32_t w = 0; w < 3; ++w) Push(w, 0);
  now_ = kQuorumLease / 2;
  for (uint32_t w = 0; w < 3; ++w) machine_->Renew(ids_[w], now_);
  now_ = kQuorumLease;
  TickCloses();
  EXPECT_EQ(actions_.lost.size(), 1u);
  for (uint64_t round = 1; round < 5; ++round) {
    for (uint32_t w = 0; w < 3; ++w) Push(w, round);
  }
  ASSERT_EQ(machine_->round(), 5u);
  actions_ = {};
  auto back = machine_->Resume("d", 1, {.round = 1}, now_, &actions_);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_NE(back->start_version, 1u);
  // What it had sent is known, what was never merged is late.
  EXPECT_EQ(*machine_->Classify(back->id, 0, 0), PushVerdict::kDuplicate);
  EXPECT_TRUE(machine_->MayAskFor(0, 0));
  EXPECT_EQ(*machine_->Classify(back->id, 0, 1), PushVerdict::kNotIncluded);
  for (uint32_t w = 0; w < 3; ++w) Push(w, 5);
  ASSERT_EQ(machine_->round(), 6u);  // nobody waited for it
  auto start = machine_->CatchUp("d", 1, 0, now_, &actions_);
  ASSERT_TRUE(start.ok()) << start.status();
  EXPECT_EQ(start->start_version, 7u);
  for (uint32_t w = 0; w < 3; ++w) Push(w, 6);
  for (uint32_t w = 0; w < 3; ++w) Push(w, 7);
  EXPECT_EQ(machine_->round(), 7u);
  Push(3, 7);
  EXPECT_EQ(machine_->round(), 8u);
}

TEST_F(QuorumTest, CatchingUpLetsTheOpenRoundGo) {
  Make(1, 2, 0);
  Push(0, 0);
  auto start = machine_->CatchUp("b", 1, 0, now_, &actions_);
  ASSERT_TRUE(start.ok());
  EXPECT_EQ(start->start_version, 1u);
  EXPECT_EQ(machine_->round(), 1u);
  // Alone in its round, with a frame in it: it cannot start there again.
  machine_->Leave(ids_[0], now_, &actions_);
  EXPECT_EQ(machine_->CatchUp("b", 1, 0, now_, &actions_)->start_version, 1u);
  Make(2, 1, 0);
  Push(2, 0, 0);
  EXPECT_EQ(machine_->CatchUp("a", 1, 0, now_, &actions_)->start_version, 1u);
}

// It asked once more when another shard was further, and has stopped waiting for what it was told first.
TEST_F(QuorumTest, CatchingUpWithALaterRoundIsNotUndoneByAnEarlierRequest) {
  Make(1, 2, 0);
  Push(0, 0);
  ASSERT_EQ(machine_->CatchUp("b", 1, 0, now_, &actions_)->start_version, 1u);
  ASSERT_EQ(machine_->CatchUp("b", 1, 3, now_, &actions_)->start_version, 3u);
  EXPECT_EQ(machine_->CatchUp("b", 1, 0, now_, &actions_)->start_version, 3u);
  for (uint64_t round = 1; round < 3; ++round) Push(0, round);
  EXPECT_EQ(machine_->round(), 3u) << "it is waited for in a round for which it waits";
  Push(0, 3);
  EXPECT_EQ(machine_->round(), 3u);
  Push(1, 3);
  EXPECT_EQ(machine_->round(), 4u);
}

TEST_F(QuorumTest, CatchingUpIsNotUndoneByAnEarlierResume) {
  Make(1, 3, 1, 0);
  for (uint32_t w = 0; w < 2; ++w) Push(w, 0);
  ASSERT_EQ(machine_->CatchUp("c", 1, 3, now_, &actions_)->start_version, 3u);
  for (uint64_t round : {0, 1}) {
    ASSERT_TRUE(machine_->Resume("c", 1, {.round = round}, now_, &actions_).ok());
    for (uint32_t w = 0; w < 2; ++w) Push(w, machine_->round());
    EXPECT_EQ(machine_->round(), round + 2) << "it is waited for in a round for which it waits";
  }
  // By now round 0 is over for good.
  Push(0, 3);
  ASSERT_TRUE(machine_->Resume("c", 1, {.round = 0}, now_, &actions_).ok());
  EXPECT_EQ(Push(2, 3), PushVerdict::kAccept) << "its frames are in no round any more";
}

// Those whose round it is evaluate, say, and renew their leases: no later round is held up by them for good.
TEST_F(QuorumTest, AsManyAsAQuorumThatWaitForTheNextRoundGoOnWithoutThoseWhoRest) {
  constexpr TimeNs kStep = Lateness::kShortestRest / 8;
  for (uint32_t quorum : {1u, 2u}) {
    SCOPED_TRACE(quorum);
    ids_.clear();
    Make(2, 4, quorum);
    const auto round_of = [&](uint64_t round, std::initializer_list<uint32_t> workers) {
      for (uint32_t w : workers) {
        for (uint32_t b : {0u, 1u}) Push(w, round, b);
      }
    };
    for (uint64_t round = 0; round < Lateness::kFewest; ++round) {
      now_ += 1000;
      round_of(round, {0, 1});
      now_ += 100;
      round_of(round, {2, 3});
    }
    const uint64_t open = machine_->round();
    ASSERT_EQ(open, Lateness::kFewest);
    const auto passes = [&](TimeNs time) {
      now_ += time;
      for (MemberId id : ids_) machine_->Renew(id, now_);
      return TickCloses();
    };
    if (quorum == 2) Push(0, open, 0);
    EXPECT_EQ(machine_->CatchUp("b", 1, 0, now_, &actions_)->start_version, open + 1);
    if (quorum == 2) {
      EXPECT_FALSE(passes(2 * Lateness::kShortestRest)) << "one that waits is no quorum";
      EXPECT_EQ(machine_->CatchUp("c", 1, 0, now_, &actions_)->start_version, open + 1);
    }
    for (int i = 0; i < 7; ++i) EXPECT_FALSE(passes(kStep)) << i;
    ASSERT_TRUE(passes(kStep));
    ASSERT_EQ(actions_.close.size(), 2u);
    EXPECT_EQ(actions_.close[0].contributors, quorum == 2 ? 1u : 0u);
    EXPECT_EQ(actions_.close[1].contributors, 0u);
    EXPECT_EQ(machine_->round(), open + 1);
    // It is theirs now, and who rested is late.
    round_of(open + 1, {1});
    if (quorum == 2) round_of(open + 1, {2});
    passes(10'000);
    EXPECT_EQ(machine_->round(), open + 2);
    EXPECT_EQ(Push(0, open, 1), PushVerdict::kNotIncluded);
  }
}

// What members sent meanwhile is still in the sockets when the server, or its machine, goes on.
TEST_F(QuorumTest, TimeInWhichTheServerDidNotRunMakesNobodyLate) {
  Make(1, 3, 2);
  const uint64_t round = Learn(500, 3);
  now_ += 1000;
  Push(0, round);
  Push(1, round);
  now_ += 100;
  constexpr TimeNs kFrozen = kQuorumLease / 2;
  now_ += kFrozen;
  machine_->Excuse(kFrozen, now_);
  EXPECT_FALSE(TickCloses());
  EXPECT_EQ(*machine_->NextTick(), now_ - 100 + 500);
  // A quorum that came behind the freeze counts from then.
  EXPECT_EQ(Push(2, round), PushVerdict::kAccept);
  now_ += 1000;
  Push(0, round + 1);
  Push(1, round + 1);
  machine_->Excuse(kFrozen, now_);
  EXPECT_EQ(*machine_->NextTick(), now_ + 500);
  now_ += 500;
  EXPECT_TRUE(TickCloses());
}

TEST_F(QuorumTest, ReplacedIncarnationNeitherResumesNorCatchesUp) {
  Make(1, 2, 0);
  ASSERT_TRUE(machine_->Join("a", 2, 0, false, now_, &actions_).ok());
  EXPECT_EQ(machine_->Resume("a", 1, {.round = 0}, now_, &actions_).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(machine_->CatchUp("a", 1, 0, now_, &actions_).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(QuorumTest, ALoneWorkerThatIsBehindOpensNoRounds) {
  Make(1, 1, 0);
  for (uint64_t round = 0; round < 4; ++round) Push(0, round);
  ASSERT_TRUE(machine_->Resume("a", 1, {.round = 0}, now_, &actions_).ok());
  EXPECT_EQ(machine_->round(), 4u);
  EXPECT_EQ(machine_->CatchUp("a", 1, 0, now_, &actions_)->start_version, 4u);
}

TEST(PushHistory, ForgetsWhoIsLongestAwayAndSaysSo) {
  PushHistory history(2, 2);
  history.Note(1, 0, 5, 50);
  history.Note(1, 0, 6, 60);
  history.Note(1, 0, 7, 70);
  EXPECT_EQ(history.Find(1, 0, 5), nullptr);
  EXPECT_EQ(*history.Find(1, 0, 6), 60u);
  EXPECT_EQ(history.Find(1, 1, 6), nullptr);
  EXPECT_TRUE(history.MayMissUpdate(0, 7));
  EXPECT_FALSE(history.MayMissUpdate(0, 6));
  history.Depart(1);
  history.Return(1);
  for (MemberId id = 2; id < 3 + PushHistory::kDeparted; ++id) {
    history.Note(id, 0, 8, 80);
    history.Depart(id);
  }
  EXPECT_NE(history.Find(1, 0, 7), nullptr);
  EXPECT_EQ(history.Find(2, 0, 8), nullptr);
  EXPECT_FALSE(history.Knows(2, 8));
  EXPECT_TRUE(history.Knows(2, 9));
  EXPECT_TRUE(history.Knows(1, 0));
}

// A snapshot is on disk, and the records that made its version are not: nobody is told that its frame was not merged.
TEST(PushHistory, WhatMissingRecordsWouldSayIsNotGuessed) {
  JointRounds::Rules rules;
  rules.buckets = 1;
  rules.needs_initialization = false;
  rules.membership = {.max_workers = 2, .lease_ns = 1000};
  JointRounds machine(rules);
  const MemberId a = MakeMemberId("a", 1);
  machine.RestoreContribution(a, 0, 4, 7);  // rounds 5 and 6 are in the snapshot alone
  JointRounds::Recovered recovered;
  recovered.round = 7;
  recovered.versions = {7};
  recovered.workers = {{"a", 1}};
  recovered.nothing_known_before = 7;
  machine.Restore(recovered, 0);
  RoundActions actions;
  ASSERT_TRUE(machine.Resume("a", 1, {.round = 6, .from_before = true}, 0, &actions).ok());
  EXPECT_EQ(machine.Classify(a, 0, 6).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(*machine.Classify(a, 0, 7), PushVerdict::kAccept);
}

// Records in the middle are missing, and who has later ones may have been in the missing ones as well.
TEST(PushHistory, WhatIsBehindMissingRecordsIsKnown) {
  PushHistory history(1, 4);
  for (const MemberId id : {1, 2}) history.Restore(id, 0, 3, 30);
  history.Restore(1, 0, 6, 60);  // the records of rounds 4 and 5 are missing
  history.ForgetAll(6);
  EXPECT_NE(history.Find(1, 0, 6), nullptr);
  EXPECT_FALSE(history.Knows(1, 5));
  EXPECT_FALSE(history.Knows(1, 3));
  EXPECT_TRUE(history.Knows(1, 7));
  EXPECT_FALSE(history.Knows(2, 5));
  EXPECT_TRUE(history.Knows(2, 6));
  EXPECT_EQ(history.incarnations(), 1u);
}

// What a standby is sent names every incarnation that ever was: of those before the last ones nothing is kept.
TEST(PushHistory, StaysBoundedWhileRecordsAreReplayed) {
  constexpr uint64_t kRounds = 500;
  JointRounds::Rules rules;
  rules.buckets = 2;
  rules.needs_initialization = false;
  rules.membership = {.max_workers = 100, .lease_ns = 1000};
  JointRounds machine(rules);
  const auto name = [](uint64_t worker) { return "w" + std::to_string(worker); };
  // 100 workers in every round, one of which is another one than in the round before.
  for (uint64_t round = 0; round < kRounds; ++round)
    for (uint32_t bucket = 0; bucket < rules.buckets; ++bucket)
      for (uint64_t worker = round; worker < round + 100; ++worker)
        machine.RestoreContribution(MakeMemberId(name(worker), 1), bucket, round, 7);
  EXPECT_LE(machine.status().histories, 100u);
  JointRounds::Recovered recovered;
  recovered.round = kRounds;
  recovered.versions = {kRounds, kRounds};
  for (uint64_t worker = kRounds - 1; worker < kRounds + 99; ++worker) recovered.workers.push_back({name(worker), 1});
  machine.Restore(recovered, 0);
  for (uint64_t worker = kRounds - 1; worker < kRounds + 99; ++worker)
    EXPECT_EQ(*machine.Classify(MakeMemberId(name(worker), 1), 1, kRounds - 1), PushVerdict::kDuplicate);
  RoundActions actions;
  machine.Tick(1000, &actions);
  EXPECT_EQ(actions.lost.size(), 100u);
  EXPECT_LE(machine.status().histories, 100u);
}

// Workers of random speed that are lost and come back: every frame is answered with what happened to it, and what
// closed buckets hold is exactly what was accepted.
TEST(RoundProperties, EveryFrameIsMergedOnceOrNotIncluded) {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    const auto below = [&random](uint32_t n) { return static_cast<uint32_t>(random() % n); };
    JointRounds::Rules rules;
    rules.buckets = 1 + below(3);
    const uint32_t workers = 2 + below(4);
    rules.min_workers = 1 + below(workers);
    rules.needs_initialization = false;
    rules.quorum = below(workers + 1);
    rules.deviations = 3;
    rules.membership = {.max_workers = workers, .lease_ns = 400};
    JointRounds machine(rules);
    TimeNs now = 0;
    RoundActions actions;
    struct Worker {
      uint64_t round = 0;
      uint32_t bucket = 0;
      bool behind = false;
      TimeNs asleep_until = 0;
    };
    std::vector<Worker> state(workers);
    std::set<std::tuple<MemberId, uint32_t, uint64_t>> accepted;
    std::set<std::tuple<MemberId, uint32_t, uint64_t>> closed;
    std::vector<uint64_t> next_close(rules.buckets, 0);
    const auto name = [](uint32_t w) { return std::string(1, static_cast<char>('a' + w)); };
    const auto drain = [&] {
      for (const auto& close : actions.close) {
        EXPECT_EQ(close.round, next_close[close.bucket]++);
        uint32_t included = 0;
        for (const auto& [id, contribution] : close.contributions) {
          included += contribution.included ? 1 : 0;
          if (contribution.included) closed.insert({id, close.bucket, close.round});
        }
        EXPECT_EQ(included, close.contributors);
      }
      actions = {};
    };
    for (uint32_t w = 0; w < workers; ++w) {
      const auto joined = machine.Join(name(w), 1, 0, false, now, &actions);
      ASSERT_TRUE(joined.ok());
      state[w].round = joined->start_version;
      drain();
    }
    for (int step = 0; step < 600; ++step) {
      now += below(20);
      machine.Tick(now, &actions);
      drain();
      const uint32_t w = below(workers);
      Worker& worker = state[w];
      const MemberId id = MakeMemberId(name(w), 1);
      if (now < worker.asleep_until) continue;
      if (below(40) == 0) {
        worker.asleep_until = now + below(1200);
        continue;
      }
      if (machine.membership().Get(id) == nullptr && worker.round > machine.round()) {
        worker.behind = true;  // it was told where to start, and has not seen that version: it asks once more
      } else if (machine.membership().Get(id) == nullptr) {
        const auto back = machine.Resume(name(w), 1, {.round = worker.round}, now, &actions);
        ASSERT_TRUE(back.ok()) << back.status();
        worker.behind = back->start_version != worker.round;
        drain();
      }
      machine.Renew(id, now);
      if (worker.behind || worker.round + 1 < machine.round()) {
        if (worker.bucket > 0 && worker.bucket < rules.buckets) {
          worker.bucket = rules.buckets;  // the rest of its frames would be answered as late
        }
        const auto start = machine.CatchUp(name(w), 1, 0, now, &actions);
        ASSERT_TRUE(start.ok()) << start.status();
        worker = {start->start_version, 0, false, 0};
        drain();
        continue;
      }
      if (worker.round > machine.round()) continue;  // waits for its version
      if (worker.bucket == rules.buckets) {
        if (worker.round < machine.round()) worker = {worker.round + 1, 0, false, 0};
        continue;
      }
      const uint32_t bucket = worker.bucket++;
      const auto verdict = machine.Complete(id, bucket, worker.round, w, now, &actions);
      ASSERT_TRUE(verdict.ok()) << verdict.status();
      EXPECT_NE(*verdict, PushVerdict::kDuplicate);
      if (*verdict == PushVerdict::kAccept) {
        EXPECT_TRUE(accepted.insert({id, bucket, worker.round}).second);
      } else {
        machine.NoteLate(id, worker.round, now);
      }
      drain();
      // Sent again, it is known or still late.
      const auto again = machine.Classify(id, bucket, worker.round);
      if (again.ok()) {
        EXPECT_EQ(*again, *verdict == PushVerdict::kAccept ? PushVerdict::kDuplicate : PushVerdict::kNotIncluded);
      }
    }
    EXPECT_GT(machine.round(), 5u);
    for (const auto& frame : closed) EXPECT_TRUE(accepted.contains(frame));
    for (const auto& frame : accepted) {
      EXPECT_TRUE(std::get<2>(frame) >= machine.round() || closed.contains(frame));
    }
  }
}

}  // namespace
}  // namespace gradwire

// For whom rounds wait: how long one member alone was awaited, while nobody else had anything left to send.
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "server/rounds/joint_rounds.h"
#include "server/rounds/lateness.h"

namespace gradwire {
namespace {

constexpr TimeNs kHeldUpLease = 10'000;

class HeldUpTest : public testing::Test {
 protected:
  void Make(uint32_t buckets, uint32_t workers, uint32_t quorum = 0, uint32_t staleness = 0) {
    JointRounds::Rules rules;
    rules.buckets = buckets;
    rules.min_workers = workers;
    rules.needs_initialization = false;
    rules.quorum = quorum;
    rules.deviations = 6;
    rules.staleness = staleness;
    rules.membership = {.max_workers = 8, .lease_ns = kHeldUpLease};
    machine_ = std::make_unique<JointRounds>(rules);
    for (uint32_t w = 0; w < workers; ++w) Join(w);
  }
  static std::string NameOf(uint32_t worker) { return std::string(1, static_cast<char>('a' + worker)); }
  void Join(uint32_t worker) { ids_[worker] = machine_->Join(NameOf(worker), 1, 0, false, now_, &actions_)->id; }
  void Push(uint32_t worker, uint32_t bucket, uint64_t round) {
    const auto verdict = machine_->Complete(ids_[worker], bucket, round, 7, now_, &actions_);
    if (verdict.ok() && *verdict == PushVerdict::kNotIncluded) machine_->NoteLate(ids_[worker], round, now_);
    machine_->Renew(ids_[worker], now_);
  }
  void Push(uint32_t worker, uint32_t bucket, uint64_t round, TimeNs now) {
    now_ = now;
    Push(worker, bucket, round);
  }
  TimeNs HeldUp(uint32_t worker) const { return machine_->HeldUp(*machine_->membership().Get(ids_.at(worker)), now_); }
  TimeNs HeldUp(uint32_t worker, TimeNs now) {
    now_ = now;
    return HeldUp(worker);
  }

  std::unique_ptr<JointRounds> machine_;
  RoundActions actions_;
  std::map<uint32_t, MemberId> ids_;
  TimeNs now_ = 0;
};

TEST_F(HeldUpTest, BeginsWhenAllOthersHaveSentAll) {
  Make(2, 3);
  Push(0, 0, 0, 10);
  Push(1, 0, 0, 20);
  Push(2, 0, 0, 30);
  EXPECT_EQ(HeldUp(1, 90), 0) << "another bucket waits for all";
  Push(2, 1, 0, 40);
  Push(1, 1, 0, 50);
  EXPECT_EQ(HeldUp(0, 90), 40) << "in a round that is open";
  EXPECT_EQ(HeldUp(2, 90), 0);
  EXPECT_EQ(HeldUp(0, 45), 0) << "of a clock that was read before";
  Push(0, 1, 0, 100);
  EXPECT_EQ(HeldUp(0, 500), 50) << "no longer awaited";
  EXPECT_EQ(HeldUp(1, 500), 0);
}

TEST_F(HeldUpTest, EndsWithAWordThatNothingComes) {
  Make(2, 2);
  for (uint32_t bucket : {0, 1}) Push(0, bucket, 0, 100);
  now_ = 130;
  EXPECT_TRUE(machine_->Abstain(ids_[1], 0, 0, now_, &actions_).ok());
  EXPECT_TRUE(machine_->Abstain(ids_[1], 0, 0, now_, &actions_).ok()) << "the same bucket does not count twice";
  EXPECT_EQ(HeldUp(1, 140), 40);
  EXPECT_TRUE(machine_->Abstain(ids_[1], 1, 0, now_, &actions_).ok());
  EXPECT_EQ(HeldUp(1, 500), 40);
}

TEST_F(HeldUpTest, DoesNotCountWhileThisServerDidNotRun) {
  Make(1, 2);
  Push(0, 0, 0, 230);
  EXPECT_EQ(HeldUp(1, 240), 10);
  machine_->Excuse(100, 340);
  EXPECT_EQ(HeldUp(1, 345), 15);
}

TEST_F(HeldUpTest, WhoIsAloneHoldsNobodyUp) {
  Make(1, 1);
  Push(0, 0, 0, 10);
  Push(0, 0, 1, 1000);
  EXPECT_EQ(HeldUp(0, 5000), 0);
}

TEST_F(HeldUpTest, WhoMissesTheDeadlineOfAQuorumHeldItUpAndNobodyElseDid) {
  Make(1, 3, 2);
  uint64_t round = 0;
  for (; round < Lateness::kFewest; ++round) {
    Push(0, 0, round, now_ + 1000);
    Push(1, 0, round);
    Push(2, 0, round, now_ + 100);
  }
  const TimeNs before = HeldUp(2);
  EXPECT_EQ(before, 100 * static_cast<TimeNs>(Lateness::kFewest));
  Push(0, 0, round, now_ + 1000);
  Push(1, 0, round, now_ + 20);
  const TimeNs deadline = *machine_->NextTick();
  ASSERT_GT(deadline, now_);
  const TimeNs waited = deadline - now_;
  EXPECT_EQ(HeldUp(2, deadline), before + waited);
  machine_->Tick(now_, &actions_);
  ASSERT_EQ(machine_->round(), round + 1) << "it closed without c";
  EXPECT_EQ(HeldUp(2, deadline + 500), before + waited) << "and keeps what it cost";
  EXPECT_EQ(HeldUp(1), 0);
  EXPECT_EQ(HeldUp(0), 0);
}

TEST_F(HeldUpTest, WhoLeavesIsForgottenAndCreditsNobody) {
  Make(1, 3);
  Push(0, 0, 0, 10);
  Push(1, 0, 0, 20);
  now_ = 100;
  machine_->Leave(ids_[2], now_, &actions_);
  EXPECT_EQ(machine_->round(), 1u);
  EXPECT_EQ(HeldUp(0, 200), 0);
  EXPECT_EQ(HeldUp(1, 200), 0);
}

TEST_F(HeldUpTest, WhoIsAheadOfABoundedRoundIsHeldUpOnlyWhereItMustWait) {
  Make(1, 2, 0, 2);
  Push(0, 0, 0, 10);
  Push(0, 0, 1, 20);
  EXPECT_EQ(HeldUp(1, 30), 0) << "a third round is open to a";
  Push(0, 0, 2, 40);
  EXPECT_EQ(HeldUp(1, 50), 10);
  Push(1, 0, 0, 60);
  EXPECT_EQ(HeldUp(1, 100), 20) << "now another round is";
  Push(0, 0, 3, 110);
  EXPECT_EQ(HeldUp(1, 120), 30);
}

// Whatever happens: it never falls while a member is one, and no two are awaited alone at a time.
TEST_F(HeldUpTest, IsATimeThatPassesForOneMemberAtMost) {
  int seen = 0;
  for (uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    const auto draw = [&random](uint32_t below) { return static_cast<uint32_t>(random() % below); };
    now_ = 0;
    ids_.clear();
    const uint32_t quorum = seed % 2 == 0 ? 0 : 2;
    Make(1 + draw(3), 4, quorum, quorum == 0 ? draw(3) : 0);
    std::map<MemberId, TimeNs> before;
    TimeNs sum = 0;
    TimeNs at = 0;
    for (int i = 0; i < 400; ++i) {
      now_ += draw(200);
      const uint32_t worker = draw(4);
      const bool there = machine_->membership().Get(ids_[worker]) != nullptr;
      const uint32_t what = draw(100);
      if (what < 2 && there) {
        machine_->Leave(ids_[worker], now_, &actions_);
      } else if (what < 4) {
        machine_->Tick(now_, &actions_);
      } else if (!there) {
        const JointRounds::ResumePoint point{.round = machine_->round()};
        machine_->Resume(NameOf(worker), 1, point, now_, &actions_).IgnoreError();
      } else {
        Push(worker, draw(3), machine_->round() + draw(3));
      }
      TimeNs grown = 0;
      std::map<MemberId, TimeNs> after;
      for (const auto& [id, member] : machine_->membership().members()) {
        after[id] = machine_->HeldUp(member, now_);
        const auto known = before.find(id);
        if (known == before.end()) continue;
        ASSERT_GE(after[id], known->second) << "seed " << seed << " event " << i;
        grown += after[id] - known->second;
      }
      ASSERT_LE(grown, now_ - at) << "seed " << seed << " event " << i;
      sum += grown;
      before = after;
      at = now_;
    }
    seen += sum > 0 ? 1 : 0;
  }
  EXPECT_GT(seen, 150) << "somebody was awaited alone";
}

}  // namespace
}  // namespace gradwire

// Rounds of a job, and what is done to them.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "server/rounds/joint_rounds.h"

namespace gradwire {

inline constexpr TimeNs kLease = 1000;

class JointRoundsTest : public testing::Test {
 protected:
  void Make(uint32_t buckets, uint32_t min_workers, bool needs_initialization = false) {
    JointRounds::Rules rules;
    rules.buckets = buckets;
    rules.min_workers = min_workers;
    rules.needs_initialization = needs_initialization;
    rules.membership = {.max_workers = 8, .lease_ns = kLease};
    machine_ = std::make_unique<JointRounds>(rules);
  }
  JointRounds::JoinOutcome Join(const std::string& worker, uint64_t incarnation = 1, uint64_t not_before = 0,
                                TimeNs now = 0, bool may_initialize = true) {
    actions_ = {};
    auto outcome = machine_->Join(worker, incarnation, not_before, may_initialize, now, &actions_);
    EXPECT_TRUE(outcome.ok()) << outcome.status();
    return *outcome;
  }
  PushVerdict Complete(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest = 7, TimeNs now = 0) {
    actions_ = {};
    auto verdict = machine_->Complete(id, bucket, round, digest, now, &actions_);
    EXPECT_TRUE(verdict.ok()) << verdict.status();
    return verdict.value_or(PushVerdict::kNotIncluded);
  }
  std::unique_ptr<JointRounds> machine_;
  RoundActions actions_;
};

}  // namespace gradwire

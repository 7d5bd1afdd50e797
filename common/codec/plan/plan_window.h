// The plans that frames of one bucket on one shard may be encoded by: those of its last versions.
#pragma once

#include <cstdint>
#include <deque>

#include "common/codec/codec.h"
#include "common/job/job.h"

namespace gradwire {

// How many versions' plans the parties of a job keep.
uint32_t PlansKept(const Job& job);
// The version whose plan the frames of `round` are encoded by. Round 0 calibrates, so version 1 has the first plan by
// which values can be encoded: rounds that would take an older one take that.
uint64_t PlanVersion(const Job& job, uint64_t round);

// Plans by version, of which the last few are kept. Not thread-safe; a plan stays where it is until it is dropped.
class PlanWindow {
 public:
  PlanWindow() = default;  // of no version
  // Keeps the plans of `depth` versions, at least one. `initial`: of version 0.
  PlanWindow(uint32_t depth, RoundPlan initial);
  // `plans`: of `version` and of those before it, the newest first; not empty. `nonfinite_rounds`: up to `version`.
  PlanWindow(uint32_t depth, uint64_t version, std::deque<RoundPlan> plans, uint32_t nonfinite_rounds = 0);

  // The plan of version() + 1; `no_step`: the round that makes it was skipped, or replaced parameters. The oldest one
  // is dropped where `depth` are kept.
  void Push(RoundPlan plan, bool no_step = false);

  uint64_t version() const { return version_; }  // of the newest plan
  // Rounds up to this version that were skipped because a gradient was not finite, or that replaced parameters;
  // optimizers do not count them.
  uint32_t nonfinite_rounds() const { return nonfinite_rounds_; }
  const RoundPlan& newest() const { return plans_.front(); }
  const std::deque<RoundPlan>& newest_first() const { return plans_; }
  // Null: it is not kept any more, or not there yet.
  const RoundPlan* Find(uint64_t version) const;
  // That of the version that PlanVersion names.
  const RoundPlan* OfRound(const Job& job, uint64_t round) const { return Find(PlanVersion(job, round)); }

  bool operator==(const PlanWindow&) const = default;

 private:
  uint32_t depth_ = 1;
  uint64_t version_ = 0;
  uint32_t nonfinite_rounds_ = 0;
  std::deque<RoundPlan> plans_;  // the newest first
};

}  // namespace gradwire

// The state of a job moved from one number of shards to another: every run keeps its parameters, moments, residual and
// exponent.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "absl/status/statusor.h"
#include "common/codec/plan/plan_reshard.h"
#include "common/job/job.h"
#include "common/job/layout.h"
#include "common/snapshot/shard_state.h"

namespace gradwire {

// Not thread-safe. Borrows job and layouts. Holds the states that it makes, and no more than the plans of those it was
// given. With the same number of shards the states stay as they are, bit for bit.
class Resharder {
 public:
  // Makes the states of `shards` of `to`.
  Resharder(const Job* job, const Layout* from, const Layout* to, std::vector<uint32_t> shards);

  // Every shard of `from` once. The states are of one version.
  void Add(uint32_t shard, const ShardState& state);
  // After all of them: the states in the order of `shards`. InvalidArgument: CheckPlan would not take a plan.
  absl::StatusOr<std::vector<ShardState>> Finish();

 private:
  // Where a run goes.
  struct Place {
    size_t state = 0;
    size_t run = 0;
  };
  using RunKey = std::pair<uint32_t, uint64_t>;  // tensor, offset

  // Those of `plans`, of `version` and before, to the plans that are made.
  void MoveFactors(const BucketLayout& from, const std::deque<RoundPlan>& plans, uint64_t version);

  const Job& job_;
  const Layout& from_;
  const Layout& to_;
  const std::vector<uint32_t> shards_;
  // By bucket of the job:
  std::vector<std::map<RunKey, Place>> places_;
  std::vector<std::vector<std::map<uint32_t, PlanPart>>> plans_;  // and age and shard of `from`; age 0: the newest plan
  std::vector<std::vector<std::deque<RoundPlan>>> made_;          // by state before, the newest first
  std::vector<ShardState> states_;
  uint32_t nonfinite_rounds_ = 0;
};

}  // namespace gradwire

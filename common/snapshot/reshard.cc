// See reshard.h.
#include "common/snapshot/reshard.h"

#include <algorithm>
#include <utility>

#include "common/base/status_macros.h"
#include "common/codec/family.h"
#include "common/codec/plan/plan_check.h"
#include "common/snapshot/snapshot_format.h"

namespace gradwire {
namespace {

constexpr snapshot::Array kArrays[] = {&ShardState::Bucket::parameter, &ShardState::Bucket::first_moment,
                                       &ShardState::Bucket::second_moment, &ShardState::Bucket::update_residual};

}  // namespace

Resharder::Resharder(const Job* job, const Layout* from, const Layout* to, std::vector<uint32_t> shards)
    : job_(*job),
      from_(*from),
      to_(*to),
      shards_(std::move(shards)),
      places_(to->bucket_count()),
      plans_(to->bucket_count()),
      made_(shards_.size(), std::vector<std::deque<RoundPlan>>(to->bucket_count())),
      states_(shards_.size()) {
  for (size_t s = 0; s < shards_.size(); ++s) {
    for (uint32_t b = 0; b < to_.bucket_count(shards_[s]); ++b) {
      const BucketLayout& slice = to_.at(b, shards_[s]);
      for (size_t r = 0; r < slice.runs.size(); ++r)
        places_[slice.job_bucket][{slice.runs[r].tensor, slice.runs[r].offset}] = {s, r};
      states_[s].buckets.emplace_back().Allocate(job_, slice);
    }
  }
}

void Resharder::Add(uint32_t shard, const ShardState& state) {
  for (ShardState& made : states_) made.version = state.version;
  for (uint32_t i = 0; i < from_.bucket_count(shard); ++i) {
    const ShardState::Bucket& bucket = state.buckets[i];
    const BucketLayout& slice = from_.at(i, shard);
    const uint32_t b = slice.job_bucket;
    const std::deque<RoundPlan>& plans = bucket.plans.newest_first();
    nonfinite_rounds_ = bucket.plans.nonfinite_rounds();
    plans_[b].resize(plans.size());
    for (size_t age = 0; age < plans.size(); ++age) {
      plans_[b][age][shard] = {&slice, {{}, plans[age].sketch_groups, plans[age].cells_per_group, {}}};
    }
    MoveFactors(slice, plans, state.version);
    for (size_t r = 0; r < slice.runs.size(); ++r) {
      const auto found = places_[b].find({slice.runs[r].tensor, slice.runs[r].offset});
      if (found == places_[b].end()) continue;  // of a shard that is not made here
      const Place place = found->second;
      const BucketLayout& target_slice = *to_.find(b, shards_[place.state]);
      ShardState::Bucket& target = states_[place.state].buckets[target_slice.bucket];
      for (const snapshot::Array array : kArrays) {
        if ((bucket.*array).empty()) continue;
        std::copy_n((bucket.*array).data() + slice.run_begin[r], slice.runs[r].length,
                    (target.*array).data() + target_slice.run_begin[place.run]);
      }
      std::deque<RoundPlan>& made = made_[place.state][b];
      made.resize(plans.size());
      for (size_t age = 0; age < plans.size(); ++age) {
        if (plans[age].exponents.empty()) continue;
        made[age].exponents.resize(target_slice.runs.size());
        made[age].exponents[place.run] = plans[age].exponents[r];
      }
    }
  }
}

void Resharder::MoveFactors(const BucketLayout& from, const std::deque<RoundPlan>& plans, uint64_t version) {
  const CodecFamily& family = FamilyOf(job_, from);
  for (size_t s = 0; s < states_.size(); ++s) {
    const BucketLayout* const to = to_.find(from.job_bucket, shards_[s]);
    if (to == nullptr) continue;
    std::deque<RoundPlan>& made = made_[s][from.job_bucket];
    made.resize(plans.size());
    for (size_t age = 0; age < plans.size(); ++age) {
      family.MoveFactors(job_, from, plans[age], version - age, *to, &made[age]);
    }
  }
}

absl::StatusOr<std::vector<ShardState>> Resharder::Finish() {
  for (size_t s = 0; s < states_.size(); ++s) {
    for (uint32_t b = 0; b < to_.bucket_count(shards_[s]); ++b) {
      const BucketLayout& slice = to_.at(b, shards_[s]);
      const std::vector<std::map<uint32_t, PlanPart>>& plans = plans_[slice.job_bucket];
      std::deque<RoundPlan>& made = made_[s][slice.job_bucket];
      made.resize(plans.size());  // an empty slice has got none
      for (size_t age = 0; age < made.size(); ++age) {
        RoundPlan& plan = made[age];
        if (from_.digest() == to_.digest()) {
          plan.sketch_groups = plans[age].at(shards_[s]).plan.sketch_groups;
          plan.cells_per_group = plans[age].at(shards_[s]).plan.cells_per_group;
        } else {
          std::vector<PlanPart> parts;
          for (const auto& [shard, part] : plans[age]) parts.push_back(part);
          RoundPlan moved = ReshardPlan(job_, slice, std::move(plan.exponents), parts);
          moved.factors = std::move(plan.factors);
          plan = std::move(moved);
        }
        GW_RETURN_IF_ERROR(CheckPlan(job_, slice, states_[s].version - age, plan));
      }
      states_[s].buckets[b].plans = PlanWindow(PlansKept(job_), states_[s].version, std::move(made), nonfinite_rounds_);
    }
  }
  return std::move(states_);
}

}  // namespace gradwire

// See reshard.h.
#include "common/snapshot/reshard.h"

#include <algorithm>
#include <utility>

#include "common/base/status_macros.h"
#include "common/codec/plan_check.h"
#include "common/snapshot/snapshot_format.h"

namespace gradwire {
namespace {

constexpr snapshot::Array kArrays[] = {&ShardState::Bucket::parameter, &ShardState::Bucket::first_moment,
                             &ShardState::Bucket::second_moment};

}  // namespace

Resharder::Resharder(const Job* job, const Layout* from, const Layout* to, std::vector<uint32_t> shards)
    : job_(*job),
      from_(*from),
      to_(*to),
      shards_(std::move(shards)),
      places_(to->bucket_count()),
      plans_(to->bucket_count()),
      states_(shards_.size()) {
  for (uint32_t b = 0; b < to_.bucket_count(); ++b) {
    plans_[b].resize(from_.shard_count());
    for (size_t s = 0; s < shards_.size(); ++s) {
      const BucketLayout& slice = to_.at(b, shards_[s]);
      for (size_t r = 0; r < slice.runs.size(); ++r) places_[b][{slice.runs[r].tensor, slice.runs[r].offset}] = {s, r};
      ShardState::Bucket& bucket = states_[s].buckets.emplace_back();
      if (job_.keeps_parameters()) bucket.parameter.resize(slice.elements);
      if (job_.moments() > 0) bucket.first_moment.resize(slice.elements);
      if (job_.moments() > 1) bucket.second_moment.resize(slice.elements);
    }
  }
}

void Resharder::Add(uint32_t shard, const ShardState& state) {
  for (ShardState& made : states_) made.version = state.version;
  for (uint32_t b = 0; b < from_.bucket_count(); ++b) {
    const BucketLayout& slice = from_.at(b, shard);
    const ShardState::Bucket& bucket = state.buckets[b];
    plans_[b][shard] = {&slice, {{}, bucket.plan.sketch_groups, bucket.plan.cells_per_group}};
    for (size_t r = 0; r < slice.runs.size(); ++r) {
      const auto found = places_[b].find({slice.runs[r].tensor, slice.runs[r].offset});
      if (found == places_[b].end()) continue;  // of a shard that is not made here
      const Place place = found->second;
      ShardState::Bucket& target = states_[place.state].buckets[b];
      const BucketLayout& target_slice = to_.at(b, shards_[place.state]);
      for (const snapshot::Array array : kArrays) {
        if ((bucket.*array).empty()) continue;
        std::copy_n((bucket.*array).data() + slice.run_begin[r], slice.runs[r].length,
                    (target.*array).data() + target_slice.run_begin[place.run]);
      }
      if (bucket.plan.exponents.empty()) continue;
      target.plan.exponents.resize(target_slice.runs.size());
      target.plan.exponents[place.run] = bucket.plan.exponents[r];
    }
  }
}

absl::StatusOr<std::vector<ShardState>> Resharder::Finish() {
  for (size_t s = 0; s < states_.size(); ++s) {
    for (uint32_t b = 0; b < to_.bucket_count(); ++b) {
      const BucketLayout& slice = to_.at(b, shards_[s]);
      RoundPlan& plan = states_[s].buckets[b].plan;
      if (from_.digest() == to_.digest()) {
        plan.sketch_groups = plans_[b][shards_[s]].plan.sketch_groups;
        plan.cells_per_group = plans_[b][shards_[s]].plan.cells_per_group;
      } else {
        plan = ReshardPlan(job_, slice, std::move(plan.exponents), plans_[b]);
      }
      GW_RETURN_IF_ERROR(CheckPlan(job_, slice, plan));
    }
  }
  return std::move(states_);
}

}  // namespace gradwire

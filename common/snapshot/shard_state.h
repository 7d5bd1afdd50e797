// All of a shard's state at one version: what a snapshot holds.
#pragma once

#include <cstdint>
#include <vector>

#include "common/codec/frame/parameters.h"
#include "common/codec/plan/plan_window.h"
#include "common/job/layout.h"
#include "common/job/update_codec.h"

namespace gradwire {

struct ShardState {
  // Arrays in position order; empty where the job keeps none.
  struct Bucket {
    PlanWindow plans;    // up to that of its version
    uint64_t ahead = 0;  // its version is so much later than `version`: asynchronous rounds
    std::vector<float> parameter;
    std::vector<float> first_moment;
    std::vector<float> second_moment;
    std::vector<float> update_residual;

    // Makes the arrays that a shard of `job` keeps for `slice`: zeros.
    void Allocate(const Job& job, const BucketLayout& slice) {
      if (job.keeps_parameters()) parameter.assign(slice.elements, 0.0f);
      if (job.moments() > 0) first_moment.assign(slice.elements, 0.0f);
      if (job.moments() > 1) second_moment.assign(slice.elements, 0.0f);
      if (KeepsUpdateResidual(job, slice.codec)) update_residual.assign(slice.elements, 0.0f);
    }
    // Those that are there, to be filled and to be read.
    ParameterTargets Targets() {
      const auto of = [](std::vector<float>& array) { return array.empty() ? nullptr : array.data(); };
      return {of(parameter), of(first_moment), of(second_moment), of(update_residual)};
    }
    ParameterArrays Arrays() const {
      const auto of = [](const std::vector<float>& array) { return array.empty() ? nullptr : array.data(); };
      return {of(parameter), of(first_moment), of(second_moment), of(update_residual)};
    }
  };
  uint64_t version = 0;
  std::vector<Bucket> buckets;
};

}  // namespace gradwire

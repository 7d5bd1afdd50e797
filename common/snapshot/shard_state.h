// All of a shard's state at one version: what a snapshot holds.
#pragma once

#include <cstdint>
#include <vector>

#include "common/codec/plan_window.h"

namespace gradwire {

struct ShardState {
  // Arrays in position order; empty where the job keeps none.
  struct Bucket {
    PlanWindow plans;    // up to that of its version
    uint64_t ahead = 0;  // its version is so much later than `version`: asynchronous rounds
    std::vector<float> parameter;
    std::vector<float> first_moment;
    std::vector<float> second_moment;
  };
  uint64_t version = 0;
  std::vector<Bucket> buckets;
};

}  // namespace gradwire

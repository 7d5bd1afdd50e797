// All of a shard's state at one version: what a snapshot holds.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/codec/codec.h"

namespace gradwire {

struct ShardState {
  // Arrays in position order; empty where the job keeps none.
  struct Bucket {
    RoundPlan plan;  // of round `version`
    std::vector<float> parameter;
    std::vector<float> first_moment;
    std::vector<float> second_moment;
  };
  uint64_t version = 0;
  std::vector<Bucket> buckets;
};

// A ShardState that is being gathered: each bucket is copied, under its own lock, when it is at the version. Buckets
// write their own part of `state`; whoever waits reads it once `missing` is 0.
struct ShardCapture {
  ShardState state;
  absl::Mutex mu;
  uint32_t missing ABSL_GUARDED_BY(mu) = 0;
  absl::Status failed ABSL_GUARDED_BY(mu);
};

}  // namespace gradwire

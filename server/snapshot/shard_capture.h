// A snapshot on its way from the buckets of a running shard to whoever writes it.
#pragma once

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "common/snapshot/shard_state.h"

namespace gradwire {

// A ShardState that is being gathered: each bucket is copied, under its own lock, when it is at the version. Buckets
// write their own part of `state`; whoever waits reads it once `missing` is 0.
struct ShardCapture {
  ShardState state;
  absl::Mutex mu;
  uint32_t missing ABSL_GUARDED_BY(mu) = 0;
  absl::Status failed ABSL_GUARDED_BY(mu);
};

}  // namespace gradwire

// A snapshot on its way from the buckets of a running shard to whoever writes it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "common/snapshot/shard_state.h"

namespace gradwire {

// A ShardState that is being gathered: each bucket is copied, under its own lock, while it is at the version, into
// its own part of `state`; whoever waits reads it once `missing` is 0.
struct ShardCapture {
  ShardState state;
  // The version at which all buckets are copied; nothing: each at its own. Constant once the first is copied.
  std::optional<uint64_t> boundary;
  absl::Mutex mu;
  uint32_t missing ABSL_GUARDED_BY(mu) = 0;           // buckets that are not copied, or whose copy is not durable yet
  std::vector<uint32_t> reached ABSL_GUARDED_BY(mu);  // buckets that can be copied, which may have been done meanwhile
  absl::Status failed ABSL_GUARDED_BY(mu);
};

}  // namespace gradwire

// The rounds of one worker, as its session sees them. Exchange: rounds that workers close together. AsyncExchange:
// every frame makes a version by itself.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/include/gradwire/session.h"
#include "client/cpp/internal/shard_link.h"
#include "client/cpp/internal/tensor_elements.h"
#include "common/codec/plan/plan_window.h"

namespace gradwire::client {

// Thread-safety and errors as Session says.
class Exchanger : public LinkEvents {
 public:
  virtual absl::Status Begin(std::span<const float> learning_rates) = 0;
  // In the place of Begin and Ready: the round replaces the job's parameters by those of the replica. Errors:
  // Unimplemented, FailedPrecondition.
  virtual absl::Status BeginReplacement() = 0;
  virtual absl::Status Ready(uint32_t tensor, const GivenGradient& gradient) = 0;
  virtual absl::Status End(int64_t timeout_ms) = 0;
  // Between two rounds: waits until all that was pushed is settled, and what was applied is that of version().
  virtual absl::Status Drain(int64_t timeout_ms) = 0;
  virtual absl::Status WaitPushed(uint32_t bucket, int64_t timeout_ms) = 0;
  virtual absl::Status WaitApplied(uint32_t bucket, int64_t timeout_ms) = 0;
  virtual bool IsReady(uint32_t tensor) const = 0;

  // Ends the exchange for good: later calls return `reason`. No memory of the caller is touched after it returned.
  virtual void Stop(const absl::Status& reason) = 0;

  virtual uint64_t version() const = 0;
  // Up to the version of the replica, of Layout::slices(). FailedPrecondition before Drain.
  virtual absl::StatusOr<std::vector<PlanWindow>> Plans() const = 0;
  virtual void AddStats(SessionStats* stats) const = 0;
};

}  // namespace gradwire::client

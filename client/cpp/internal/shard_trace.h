// What shards note of some rounds (RecordTrace, ReadTrace), as processes of one trace on one clock.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/clock.h"
#include "common/trace/chrome_trace.h"

namespace gradwire::client {

// Calls `method` of gradwire.v1.Operator on a shard server.
using OperatorCall = std::function<absl::StatusOr<std::string>(std::string_view method, std::string request)>;

// The rounds of `job` that a trace is about.
struct TracedRounds {
  std::string job;
  uint64_t first = 0;
  uint64_t count = 0;
};

// Asks a shard to note them from now on. Errors: those of the call.
absl::Status RecordShardTrace(const OperatorCall& call, const TracedRounds& rounds);

// What shard `shard` has noted of them. offset_ns is what is added to its clock for `clock`, found from the fastest of
// several calls, half of whose time is clock_error_ns. Errors: those of the calls; FailedPrecondition: it notes others.
absl::StatusOr<TracedProcess> ReadShardTrace(const OperatorCall& call, const TracedRounds& rounds, uint32_t shard,
                                             Clock* clock);

// `processes`: shards in order, each with the offset to one clock, and a worker on that clock, if any. Afterwards their
// offsets are those to the clock of the first shard, which every file of a job has in common; a shard that could not be
// asked leaves them as they are.
void AlignToFirst(std::vector<TracedProcess>* processes);

}  // namespace gradwire::client

// What several processes noted of the same rounds, as one file for https://ui.perfetto.dev: Chrome's trace event
// format.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "gradwire/v1/trace.pb.h"

namespace gradwire {

// One process of a trace.
struct TracedProcess {
  std::string name;            // what the viewer shows
  std::string worker;          // empty: a shard server
  uint32_t shard = 0;          // of a shard server
  int64_t offset_ns = 0;       // added to its clock: the time of the file
  int64_t clock_error_ns = 0;  // by which that may be off, at most, where both ways took as long as they may
  std::vector<v1::TraceEvent> events;
  uint64_t dropped = 0;                     // events for which it had no room
  std::map<uint64_t, std::string> members;  // TraceEvent.member -> worker
  std::string missing;                      // why there are no events; empty: there are
};

// A JSON object: `traceEvents`, a complete event ("X") for each event with its round, bucket and bytes in `args`, and
// arrows ("s", "f") from each frame's sending to its merging and from each answer to where it was received;
// `otherData`, clocks and gaps of the processes. `tensors`: their names. Threads are named by what they did.
std::string ChromeTrace(const std::vector<TracedProcess>& processes, const std::vector<std::string>& tensors);

// "end round" of TRACE_END_ROUND.
std::string TraceStageName(v1::TraceStage stage);

}  // namespace gradwire

// See shard_trace.h.
#include "client/cpp/internal/shard_trace.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/trace/recorder.h"
#include "gradwire/v1/operator.pb.h"

namespace gradwire::client {
namespace {

constexpr int kClockCalls = 8;
constexpr uint32_t kEventsPerPage = 4096;

absl::StatusOr<v1::TracePage> ReadPage(const OperatorCall& call, const std::string& job, uint64_t from,
                                       uint32_t limit) {
  v1::ReadTraceRequest request;
  request.set_job(job);
  request.set_from(from);
  request.set_limit(limit);
  GW_ASSIGN_OR_RETURN(const std::string answer, call("ReadTrace", request.SerializeAsString()));
  v1::TracePage page;
  if (!page.ParseFromString(answer)) return absl::InternalError("the answer of ReadTrace cannot be parsed");
  return page;
}

}  // namespace

absl::Status RecordShardTrace(const OperatorCall& call, const TracedRounds& rounds) {
  v1::RecordTraceRequest request;
  request.set_job(rounds.job);
  request.set_first_round(rounds.first);
  request.set_rounds(rounds.count);
  return call("RecordTrace", request.SerializeAsString()).status();
}

absl::StatusOr<TracedProcess> ReadShardTrace(const OperatorCall& call, const TracedRounds& rounds, uint32_t shard,
                                             Clock* clock) {
  TracedProcess process;
  process.name = absl::StrCat("shard ", shard);
  process.shard = shard;
  TimeNs fastest = std::numeric_limits<TimeNs>::max();
  for (int i = 0; i < kClockCalls; ++i) {
    const TimeNs begin = clock->Now();
    GW_ASSIGN_OR_RETURN(const v1::TracePage page, ReadPage(call, rounds.job, 0, 0));
    const TimeNs took = clock->Now() - begin;
    if (took >= fastest) continue;
    fastest = took;
    process.offset_ns = begin + took / 2 - page.clock_ns();  // as if both ways took as long
    process.clock_error_ns = took / 2;
  }
  for (uint64_t from = 0, total = 1; from < std::min<uint64_t>(total, TraceRecorder::kMaxNotes);) {
    GW_ASSIGN_OR_RETURN(const v1::TracePage page, ReadPage(call, rounds.job, from, kEventsPerPage));
    if (page.first_round() != rounds.first || page.rounds() != rounds.count)
      return absl::FailedPreconditionError(
          absl::StrCat("shard ", shard, " traces ", page.rounds(), " rounds from ", page.first_round(),
                       " on by now, as somebody asked after this trace of ", rounds.count, " from ", rounds.first));
    for (const v1::TraceEvent& event : page.events()) process.events.push_back(event);
    for (const v1::TracePage::Member& member : page.members()) process.members[member.id()] = member.worker();
    process.dropped = page.dropped();
    total = page.events().empty() ? from : page.total();
    from += static_cast<uint64_t>(page.events_size());
  }
  return process;
}

void AlignToFirst(std::vector<TracedProcess>* processes) {
  if (!processes->front().missing.empty()) return;
  const int64_t offset_ns = processes->front().offset_ns;
  const int64_t error_ns = processes->front().clock_error_ns;
  for (TracedProcess& process : *processes) {
    process.offset_ns -= offset_ns;
    process.clock_error_ns += error_ns;
  }
  processes->front().clock_error_ns = 0;
}

}  // namespace gradwire::client

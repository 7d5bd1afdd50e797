// What a shard notes of some rounds; see job_shard.h.
#include "absl/strings/str_format.h"
#include "server/job/job_shard.h"

namespace gradwire {

absl::Status JobShard::RecordTrace(uint64_t first_round, uint64_t rounds) {
  const std::shared_ptr<MemoryAccount>& account = parts_.environment.account;
  absl::MutexLock lock(&parts_.mu);
  if (account != nullptr && !MemoryAccount::Resize(account, TraceRecorder::kMaxBytes, &parts_.trace_share)) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "job '%s': a trace takes %d bytes of this server, and %d of its %d (--memory-limit-bytes) are taken by jobs",
        parts_.job.spec().name(), TraceRecorder::kMaxBytes, account->used(), account->limit_bytes()));
  }
  parts_.trace.Record(first_round, rounds);
  return absl::OkStatus();
}

v1::TracePage JobShard::ReadTrace(uint64_t from, size_t limit) {
  const TraceRecorder::Page noted = parts_.trace.Read(from, limit);
  v1::TracePage page;
  for (const TraceNote& note : noted.notes) *page.add_events() = ToProto(note);
  page.set_total(noted.total);
  page.set_dropped(noted.dropped);
  page.set_first_round(noted.first_round);
  page.set_rounds(noted.rounds);
  {
    absl::MutexLock lock(&parts_.mu);
    for (const auto& [id, member] : parts_.rounds->membership().members()) {
      v1::TracePage::Member* const named = page.add_members();
      named->set_id(id);
      named->set_worker(member.worker);
    }
  }
  page.set_clock_ns(parts_.trace.Now());  // last: a clock is compared by when the call began and ended
  return page;
}

}  // namespace gradwire

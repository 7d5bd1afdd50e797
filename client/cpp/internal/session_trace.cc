// See session_trace.h.
#include "client/cpp/internal/session_trace.h"

#include <filesystem>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/trace/chrome_trace.h"

namespace gradwire::client {
namespace {

constexpr uint64_t kMaxRounds = 1000;  // as RecordTrace allows

}  // namespace

absl::Status SessionTrace::Check(const TraceOptions& options) {
  if (options.path.empty()) return absl::OkStatus();
  if (options.rounds < 1 || options.rounds > kMaxRounds)
    return absl::InvalidArgumentError(
        absl::StrCat("trace.rounds is ", options.rounds, "; allowed are 1 to ", kMaxRounds));
  const std::filesystem::path folder = std::filesystem::path(options.path).parent_path();
  std::error_code ignored;
  if (!folder.empty() && !std::filesystem::is_directory(folder, ignored))
    return absl::InvalidArgumentError(
        absl::StrCat("trace.path is '", options.path, "', and there is no folder '", folder.string(), "'"));
  return absl::OkStatus();
}

SessionTrace::SessionTrace(const TraceOptions& options, const Job* job, std::string worker,
                           std::function<void(const std::string&)> notice)
    : path_(options.path),
      rounds_{job->spec().name(), options.first_round, options.rounds},
      job_(*job),
      worker_(std::move(worker)),
      notice_(std::move(notice)) {}

void SessionTrace::Begin(std::vector<OperatorCall> shards) {
  if (path_.empty()) return;
  recorder_.Record(rounds_.first, rounds_.count);
  shards_ = std::move(shards);
  for (const OperatorCall& shard : shards_)
    if (const absl::Status asked = RecordShardTrace(shard, rounds_); !asked.ok())
      Tell(absl::StrCat("the trace will lack a shard: ", std::string(asked.message())));
  absl::MutexLock lock(&mu_);
  recording_ = true;
}

void SessionTrace::End() {
  {
    absl::MutexLock lock(&mu_);
    const auto idle = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !writing_; };
    mu_.Await(absl::Condition(&idle));
    if (!recording_) return;
    recording_ = false;
    writing_ = true;
  }
  Write();
  absl::MutexLock lock(&mu_);
  writing_ = false;
}

void SessionTrace::Write() {
  std::vector<TracedProcess> processes;
  for (const OperatorCall& shard : shards_) {
    const auto index = static_cast<uint32_t>(processes.size());
    absl::StatusOr<TracedProcess> process = ReadShardTrace(shard, rounds_, index, &clock_);
    if (!process.ok()) {
      TracedProcess none;
      none.name = absl::StrCat("shard ", index);
      none.shard = index;
      none.missing = std::string(process.status().message());
      process = std::move(none);
    }
    processes.push_back(*std::move(process));
  }
  const TraceRecorder::Page noted = recorder_.Read(0, TraceRecorder::kMaxNotes);
  TracedProcess& mine = processes.emplace_back();
  mine.name = worker_;
  mine.worker = worker_;
  mine.dropped = noted.dropped;
  for (const TraceNote& note : noted.notes) mine.events.push_back(ToProto(note));
  AlignToFirst(&processes);
  std::vector<std::string> tensors;
  for (const Tensor& tensor : job_.tensors()) tensors.push_back(tensor.name);
  std::ofstream file(path_, std::ios::binary | std::ios::trunc);
  file << ChromeTrace(processes, tensors);
  file.close();
  Tell(file.good() ? absl::StrCat("trace: ", path_, ": open it in https://ui.perfetto.dev")
                   : absl::StrCat("trace: '", path_, "' cannot be written"));
}

}  // namespace gradwire::client

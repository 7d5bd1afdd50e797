// A session's trace: what it notes itself of the rounds that it was asked for, and what the shards note, in one file.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/include/gradwire/session.h"
#include "client/cpp/internal/shard_trace.h"
#include "common/base/clock.h"
#include "common/job/job.h"
#include "common/trace/recorder.h"

namespace gradwire::client {

// Thread-safe once Begin has returned. Not asked for any rounds, it does nothing.
class SessionTrace {
 public:
  // InvalidArgument, saying which option.
  static absl::Status Check(const TraceOptions& options);

  SessionTrace(const TraceOptions& options, const Job* job, std::string worker,
               std::function<void(const std::string&)> notice);

  TraceRecorder* recorder() { return &recorder_; }
  // Notes from now on, here and on the shards. `shards`: a call for each; used until End. A shard that cannot is told
  // as a notice: training goes on.
  void Begin(std::vector<OperatorCall> shards);
  // `version` is that of the replica, between two rounds. Writes the file one round after those that are noted, for the
  // shards answer others as well.
  void NoteVersion(uint64_t version) {
    if (version > rounds_.first && version - rounds_.first > rounds_.count) End();
  }
  // Writes the file with what there is, unless it is written; then the shards are not called any more.
  void End();

 private:
  void Write();
  void Tell(const std::string& what) const {
    if (notice_) notice_(what);
  }

  const std::string path_;
  const TracedRounds rounds_;
  const Job& job_;
  const std::string worker_;
  const std::function<void(const std::string&)> notice_;
  SteadyClock clock_;
  TraceRecorder recorder_{&clock_};
  std::vector<OperatorCall> shards_;
  absl::Mutex mu_;
  bool recording_ ABSL_GUARDED_BY(mu_) = false;
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace gradwire::client

// The listening side of the inproc transport: one service, its executor, the streams and calls it has open.
#pragma once

#include <unistd.h>

#include <memory>
#include <string>
#include <unordered_map>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/transport/inproc/executor.h"
#include "common/transport/inproc/pipe.h"
#include "common/transport/transport.h"

namespace gradwire::transport {

// Thread-safe. Owned by its listener; channels hold it for the length of a call.
class InprocEndpoint {
 public:
  InprocEndpoint(Service* service, const Limits& limits);

  absl::StatusOr<std::string> Call(Method method, std::string request, int64_t timeout_ms) ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<std::shared_ptr<Pipe>> Open(Method method, StreamSink* sink, const Limits& client_limits)
      ABSL_LOCKS_EXCLUDED(mu_);
  bool InItsProcess() const { return getpid() == process_; }
  // Ends every stream with Unavailable and waits for them and for running calls. Later calls and streams are refused.
  void Shutdown() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void OnPipeClosed(Pipe* pipe) ABSL_LOCKS_EXCLUDED(mu_);
  bool Idle() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return pipes_.empty() && calls_ == 0; }

  const pid_t process_ = getpid();
  Service* const service_;
  const Limits limits_;
  std::unique_ptr<Executor> executor_;  // until Shutdown
  absl::Mutex mu_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  int calls_ ABSL_GUARDED_BY(mu_) = 0;  // running
  std::unordered_map<Pipe*, std::shared_ptr<Pipe>> pipes_ ABSL_GUARDED_BY(mu_);
};

}  // namespace gradwire::transport

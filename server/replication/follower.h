// The standby's end of replication: connects to the primary again and again, applies what comes, says what it has
// taken. Contract: proto/REPLICATION.md.
//
//   stream -> records -> Recovery::Follow -> journal -> Taken -> stream
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/base/clock.h"
#include "common/storage/lineage.h"
#include "common/transport/transport.h"
#include "gradwire/v1/replication.pb.h"
#include "server/desk/outbox.h"
#include "server/job/job_registry.h"
#include "server/replication/record_pieces.h"

namespace gradwire {

struct FollowerOptions {
  std::string primary;       // address
  std::string name;          // of this server, for the primary's status
  uint64_t known_epoch = 0;  // of `lineage`: a primary with a smaller one is refused
  bool in_sync = false;      // with that, as another follower was told last
  uint64_t least_term = 0;   // one of an earlier term is replaced, whether it knows or not: nothing is taken of it
  Lineage lineage;           // whose jobs this server has; none: nobody's yet
  // The primary's, told before anything of it is taken: on disk when it returns ok. FailedPrecondition where the jobs
  // that this server has are of another one.
  std::function<absl::Status(const Lineage&)> adopt;
  int64_t timeout_ms = 5000;
  std::function<absl::StatusOr<std::shared_ptr<transport::Channel>>(const std::string& address)> dial;
  bool thread = true;  // of its own; else whoever owns it calls TakeTurn
};

// What a standby knows of its primary.
struct FollowerState {
  uint64_t epoch = 0;  // the largest that it has followed, or knew at the start; of `lineage`
  Lineage lineage;
  bool connected = false;
  bool in_sync = false;  // as it was told last
  std::string why_not;   // not in sync, or not connected
};

// Thread-safe. Owns its thread, if it has one, from Start to Stop.
class Follower {
 public:
  // `registry` (which follows: JobRegistry::Recover, Adopt) and `clock` outlive the follower.
  Follower(FollowerOptions options, JobRegistry* registry, Clock* clock);
  ~Follower();
  Follower(const Follower&) = delete;
  Follower& operator=(const Follower&) = delete;

  // Errors: InvalidArgument (the address).
  absl::Status Start();
  // Opens a stream where there is none, else looks after the one that is open. How long until the next call; where the
  // stream ends before, at once. Without a thread; one call at a time, and none once Stop was called.
  absl::Duration TakeTurn();
  // The stream that was open has ended: a turn is due.
  bool ended() const;
  // Nothing is applied any more when this returns.
  void Stop();
  FollowerState state() const;
  // The primary, for calls. Once started.
  transport::Channel& channel() { return *channel_; }

 private:
  class Line;
  class Reports;
  struct OpenStream;

  void Run();
  absl::Status Open();
  // Why the stream has ended; ok while it goes on.
  absl::Status LookAfter();
  void CloseStream();
  // How long until the next try.
  absl::Duration NoteEnd(const absl::Status& ended);
  // An error of the stream says more than that of sending.
  absl::Status Send(const v1::FollowRequest& request);
  absl::Duration beat() const;
  // What this server has of jobs, for the primary to go on from.
  void AddCopies(v1::FollowOpen* open) const;
  absl::Status Handle(Line& line, const transport::Message& message);
  absl::Status Hello(const v1::FollowHello& hello);
  absl::Status Begin(Line& line, const v1::FollowBegin& begin);
  absl::Status Record(Line& line, const v1::FollowRecord& record, const transport::Message& message);
  absl::Status Deleted(Line& line, const v1::FollowDeleted& deleted);
  void Beat(const Line& line, const v1::FollowBeat& beat);
  void NotInSync(std::string_view why);

  const FollowerOptions options_;
  JobRegistry* const registry_;
  Clock* const clock_;
  std::shared_ptr<transport::Channel> channel_;
  std::thread thread_;
  // Of whoever takes the turns.
  std::unique_ptr<OpenStream> open_;
  int64_t pause_ms_ = 0;
  std::string said_;
  // Of the stream that is open; between two, of whoever takes the turns.
  std::map<std::string, std::shared_ptr<Reports>> reports_;  // by job
  std::atomic<bool> take_whole_{false};                      // records of the last stream did not fit

  mutable absl::Mutex mu_;
  absl::CondVar wake_;
  FollowerState state_ ABSL_GUARDED_BY(mu_);
  Line* line_ ABSL_GUARDED_BY(mu_) = nullptr;  // the stream that is open
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace gradwire

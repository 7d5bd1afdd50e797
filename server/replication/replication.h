// What this server is to others of its kind: a primary, a standby of one, or fenced because another has taken over. It
// feeds its standbys, follows its primary, is promoted and gets fenced. Contract: proto/REPLICATION.md.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/base/clock.h"
#include "common/storage/data_directory.h"
#include "gradwire/v1/operator.pb.h"
#include "gradwire/v1/replication.pb.h"
#include "server/job/job_registry.h"
#include "server/replication/feed.h"
#include "server/replication/follower.h"

namespace gradwire {

struct ReplicationOptions {
  std::string follow;  // address of the primary; empty: none
  int64_t follower_timeout_ms = 5000;
};

// Thread-safe after Start. Owns a thread where this server was promoted: it tells the former primary.
class Replication {
 public:
  // `data` may be null: nothing is durable, so nothing is followed. All of them outlive this.
  Replication(ReplicationOptions options, JobRegistry* registry, DataDirectory* data, Clock* clock);
  ~Replication();
  Replication(const Replication&) = delete;
  Replication& operator=(const Replication&) = delete;

  // Decides what this server is and recovers its jobs. Before anybody calls. Errors: FailedPrecondition (roles and
  // --follow do not fit; says what to do), those of JobRegistry::Recover.
  absl::Status Start();
  // Begins to follow, where it is a standby. `name`: how this server is known to others; `on_serving`: called with
  // whether workers are served, now and when that changes. Errors: InvalidArgument (the primary's address).
  absl::Status Run(const std::string& name, std::function<void(bool)> on_serving);
  // Ends every thread; standbys are told by the end of their streams.
  void Stop();

  // Ok where workers are served; else Unavailable, saying whom to ask instead.
  absl::Status CheckServing() const;
  // Somebody knows of a server of `epoch`: fences this one if that has a later term.
  void HearOf(uint64_t epoch, std::string_view name);
  // FailedPrecondition where that server's epoch is not larger.
  absl::Status Fence(const v1::FenceRequest& request);
  // The epoch that this server has from now on. FailedPrecondition where it is not in sync with its primary and
  // `force` is not set, or somebody else has taken over already.
  absl::StatusOr<uint64_t> Promote(bool force);
  void Describe(v1::ShardStatus* status) const;

  // A standby has opened a stream; the feed is the stream's from Start to Stop. Errors: Unavailable (this server is no
  // primary), FailedPrecondition (it keeps nothing that could be followed).
  absl::StatusOr<std::shared_ptr<Feed>> Admit(const v1::FollowOpen& open, std::shared_ptr<Outbox> out);
  void Tick();

 private:
  enum class Role { kPrimary, kStandby, kFenced };

  absl::Status StartAsStandby(const StoredRole& stored);
  void BecomeFenced(uint64_t epoch, std::string_view name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mu_);
  Role role() const;
  absl::Status CallFence(transport::Channel& channel, uint64_t epoch) const;
  void TellUntilAnswered(uint64_t epoch);
  std::vector<std::shared_ptr<Feed>> Feeds() ABSL_LOCKS_EXCLUDED(mu_);
  uint64_t epoch() const { return *registry_->environment().server_epoch; }

  const ReplicationOptions options_;
  JobRegistry* const registry_;
  DataDirectory* const data_;
  Clock* const clock_;
  std::string name_;  // constant after Run

  // Held while the role changes, which waits for disks, threads and the primary.
  absl::Mutex change_mu_ ABSL_ACQUIRED_BEFORE(mu_);
  std::function<void(bool)> on_serving_ ABSL_GUARDED_BY(change_mu_) = [](bool) {};
  std::thread teller_;

  mutable absl::Mutex mu_;
  absl::CondVar wake_;
  Role role_ ABSL_GUARDED_BY(mu_) = Role::kPrimary;
  std::string fenced_why_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<Follower> follower_ ABSL_GUARDED_BY(mu_);
  std::vector<std::weak_ptr<Feed>> feeds_ ABSL_GUARDED_BY(mu_);
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace gradwire

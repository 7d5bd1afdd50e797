// What this server is to others of its kind: a primary, a standby of one, or fenced because another has taken over. It
// feeds its standbys, follows its primary, is promoted and gets fenced. Contract: proto/REPLICATION.md.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/base/clock.h"
#include "common/storage/data_directory.h"
#include "common/transport/transport.h"
#include "gradwire/v1/operator.pb.h"
#include "gradwire/v1/replication.pb.h"
#include "server/job/job_registry.h"
#include "server/lease/lease.h"
#include "server/replication/feed.h"
#include "server/replication/follower.h"

namespace gradwire {

struct ReplicationOptions {
  std::string follow;  // address of the primary; empty: none
  int64_t follower_timeout_ms = 5000;
  int64_t lease_ttl_ms = 10'000;
  uint32_t max_standbys = 4;                    // Follow streams at once
  uint64_t standby_queue_bytes = 256ull << 20;  // FeedShare
  // Whoever holds it is primary; `follow` is then the other server that may. The name is this server's. May be empty.
  std::function<absl::StatusOr<std::unique_ptr<Lease>>(const std::string& name)> make_lease;
  std::function<absl::StatusOr<std::shared_ptr<transport::Channel>>(const std::string& address)> dial =
      [](const std::string& address) { return transport::Dial(address); };
  bool threads = true;  // of its own; else whoever owns it calls TakeTurns, and there is no lease
};

// Thread-safe after Start. Owns up to two threads, or none (ReplicationOptions::threads): one that tells the former
// primary that this server was promoted, one that holds the lease.
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
  // A worker or standby says that it knows a server of `epoch` and the lineage of this id. Unavailable where that has
  // replaced this one, FailedPrecondition where it was started later in a copy of the same data directory. Changes
  // nothing: everybody can say so, and whoever has taken over tells this server itself (Fence).
  absl::Status CheckNotReplaced(uint64_t epoch, uint64_t lineage) const;
  // InvalidArgument (no server's name), PermissionDenied (another lineage), FailedPrecondition (that server's epoch is
  // not larger, or none that it can have; this server keeps nothing; a lease decides).
  absl::Status Fence(const v1::FenceRequest& request);
  // The epoch that this server has from now on. FailedPrecondition where it is not in sync with its primary and
  // `force` is not set, or somebody else has taken over already.
  absl::StatusOr<uint64_t> Promote(bool force);
  void Describe(v1::ShardStatus* status) const;

  // A standby has opened a stream; the feed is the stream's from Start to Stop. Errors: Unavailable (this server is no
  // primary), InvalidArgument (no server's name, more copies than there are jobs), ResourceExhausted (it has as many
  // standbys as it may have), FailedPrecondition (it keeps nothing that could be followed).
  absl::StatusOr<std::shared_ptr<Feed>> Admit(const v1::FollowOpen& open, std::shared_ptr<Outbox> out);
  void Tick();
  // Without threads: those of the feeds, of the follower, and of who tells the former primary that it is replaced. When
  // the next ones are due, unless something happens before.
  TimeNs TakeTurns();
  // As JobRegistry's.
  void WarnRefused(std::string_view what, const absl::Status& status) { registry_->WarnRefused(what, status); }

 private:
  enum class Role { kPrimary, kStandby, kFenced };

  absl::Status StartAsStandby(const StoredRole& stored);
  // `by`: the role to be stored; `why`: for those who ask.
  void BecomeFenced(const StoredRole& by, const std::string& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mu_);
  void FenceBy(uint64_t epoch, std::string_view name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mu_);
  absl::Status CheckFence(const v1::FenceRequest& request) const;
  // Where this server has none: from now on it serves, or what it has is that of a primary.
  absl::Status EnsureLineage();
  absl::Status Adopt(const Lineage& lineage);
  absl::Status KeepLineage(const Lineage& lineage);
  Lineage lineage() const;
  // Both: what the one before it had heard last.
  absl::Status StartFollower(uint64_t known_epoch, bool in_sync = false);
  // Opens the jobs with `epoch`, once that and the role are stored.
  absl::Status Serve(uint64_t epoch, uint64_t known_epoch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mu_);
  void TellLater(uint64_t epoch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mu_);
  // replication_lease.cc
  void HoldLease();
  // One look at the lease; how long to wait for the next.
  absl::Duration LookAtLease();
  TimeNs UntilOf(const Lease::State& state) const;
  void TakeOver(const Lease::State& state);
  // Lets rounds go on without a standby that fell out of sync, or has not heard of a job, once it cannot take over any
  // more. False: not yet.
  bool GoOnAlone() ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mu_);
  std::string WhyNotEligible(const Lease::State& state) const;
  // False: not yet.
  bool StandBy();
  absl::StatusOr<uint64_t> PromoteByLease(bool force);
  Role role() const;
  absl::Status CallFence(transport::Channel& channel, uint64_t epoch) const;
  void TellUntilAnswered(uint64_t epoch);
  // Tells the former primary; how long until it has to be told again, forever if not at all.
  absl::Duration TellOnce(transport::Channel& channel, uint64_t epoch);
  std::vector<std::shared_ptr<Feed>> Feeds() ABSL_LOCKS_EXCLUDED(mu_);
  uint64_t epoch() const { return registry_->environment().epochs->now(); }

  const ReplicationOptions options_;
  JobRegistry* const registry_;
  DataDirectory* const data_;
  Clock* const clock_;
  FeedShare share_;
  std::string name_;  // constant after Run

  // Held while the role changes, which waits for disks, threads and the primary.
  absl::Mutex change_mu_ ABSL_ACQUIRED_BEFORE(mu_);
  std::function<void(bool)> on_serving_ ABSL_GUARDED_BY(change_mu_) = [](bool) {};
  std::thread teller_;
  // Without threads: of TakeTurns.
  TimeNs next_follow_ = 0;
  std::optional<TimeNs> next_tell_;
  // Of the lease's thread.
  std::unique_ptr<Lease> lease_;
  std::string lease_said_;
  std::thread lease_thread_;

  mutable absl::Mutex mu_;
  absl::CondVar wake_;
  bool lost_sync_ ABSL_GUARDED_BY(mu_) = false;  // with a lease: see GoOnAlone
  bool look_now_ ABSL_GUARDED_BY(mu_) = false;   // that came about since the lease's thread has looked
  bool forced_ ABSL_GUARDED_BY(mu_) = false;     // an operator wants it whatever it lacks
  Role role_ ABSL_GUARDED_BY(mu_) = Role::kPrimary;
  std::string fenced_why_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<Follower> follower_ ABSL_GUARDED_BY(mu_);
  std::vector<std::weak_ptr<Feed>> feeds_ ABSL_GUARDED_BY(mu_);
  Lineage lineage_ ABSL_GUARDED_BY(mu_);
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace gradwire

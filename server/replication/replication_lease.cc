// What this server does while a lease says who is primary; see replication.h. All of it on the lease's thread, except
// for PromoteByLease.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <limits>

#include "absl/strings/str_format.h"
#include "common/base/names.h"
#include "server/replication/beat.h"
#include "server/replication/epoch.h"
#include "server/replication/replication.h"

namespace gradwire {
namespace {

constexpr int64_t kLooksPerTtl = 3;
// A primary stops this part of the time to live before the lease ends.
constexpr int64_t kMarginPerTtl = 10;

}  // namespace

void Replication::HoldLease() {
  for (;;) {
    const absl::Duration wait = LookAtLease();
    absl::MutexLock lock(&mu_);
    if (!stop_ && !look_now_) wake_.WaitWithTimeout(&mu_, wait);
    look_now_ = false;
    if (stop_) break;
  }
  registry_->ServeUntil(0);  // before somebody else may
  lease_->Release();
}

absl::Duration Replication::LookAtLease() {
  const absl::Duration wait = absl::Milliseconds(options_.lease_ttl_ms / kLooksPerTtl);
  const absl::StatusOr<Lease::State> state = lease_->Hold();
  const std::string said = state.ok() ? "" : std::string(state.status().message());
  if (!state.ok() && said != lease_said_) spdlog::warn("the lease cannot be looked at: {}", said);
  const Role role = this->role();
  if (!state.ok() || !state->held || role == Role::kPrimary) lease_said_ = said;
  if (role == Role::kFenced) {
    if (!StandBy()) lease_->Release();  // for another one
    return wait;
  }
  if (!state.ok()) return wait / 2;
  if (role == Role::kPrimary) {
    absl::MutexLock change(&change_mu_);
    if (this->role() != Role::kPrimary) return absl::ZeroDuration();
    if (!state->held) {
      const std::string holder = IsServerName(state->holder) ? state->holder : "";
      BecomeFenced(
          {StoredRole::Kind::kFenced, epoch(), holder},
          absl::StrFormat("%s holds the lease now", state->holder.empty() ? "nobody" : Printable(state->holder)));
      return absl::ZeroDuration();
    }
    // Once it was too late, Tick fences.
    if (clock_->Now() < registry_->serve_until()) registry_->ServeUntil(UntilOf(*state));
    return GoOnAlone() ? wait : wait / 2;
  }
  const std::string why = state->held ? WhyNotEligible(*state) : "";
  if (state->held && why.empty()) {
    TakeOver(*state);
    return wait;
  }
  if (!state->held) return wait;
  if (why != lease_said_) spdlog::warn("the lease is free, but this server does not take it: {}", why);
  lease_said_ = why;
  lease_->Release();
  return wait;
}

TimeNs Replication::UntilOf(const Lease::State& state) const {
  return state.until - NsOfMs(options_.lease_ttl_ms) / kMarginPerTtl;
}

bool Replication::GoOnAlone() {
  {
    absl::MutexLock lock(&mu_);
    if (!lost_sync_) return true;
    lost_sync_ = false;
  }
  std::vector<std::pair<JobRegistry::DurableJob, uint64_t>> losses;  // those that come later wait for a later epoch
  for (const JobRegistry::DurableJob& job : registry_->Durable()) losses.emplace_back(job, job.sink->losses());
  // Who was lost knows the epoch of before, so it does not take over any more. Who is in sync is told the next one.
  const uint64_t next = epoch() + 1;
  absl::Status status = data_->RaiseEpoch(next);
  if (status.ok()) status = lease_->Announce(next);
  if (status.ok()) {
    registry_->environment().epochs->Raise(next);
    for (const auto& feed : Feeds()) feed->BeatSoon();
    for (const auto& [job, known] : losses) job.sink->Forgive(known);
    return true;
  }
  spdlog::warn(
      "rounds wait: a standby fell out of sync, or may not know of a job, and the next epoch cannot be announced: {}",
      status.ToString());
  absl::MutexLock lock(&mu_);
  lost_sync_ = true;
  return false;
}

std::string Replication::WhyNotEligible(const Lease::State& state) const {
  FollowerState known;
  {
    absl::MutexLock lock(&mu_);
    if (forced_) return "";
    if (follower_ != nullptr) known = follower_->state();
  }
  const StoredRole stored = data_->role();
  if (state.last_epoch == 0 && (stored.kind == StoredRole::Kind::kNone || stored.kind == StoredRole::Kind::kPrimary)) {
    return "";
  }
  // That of its directory is later where an announcement failed, or was made and not answered.
  if (state.last_primary == name_ && TermOf(data_->epoch()) >= TermOf(state.last_epoch)) return "";
  if (known.in_sync && (state.last_epoch == 0 || known.epoch == state.last_epoch)) return "";
  return absl::StrFormat("the last primary was %s with epoch %s, and this server may lack versions of it (%s)",
                         Printable(state.last_primary), EpochText(state.last_epoch),
                         known.why_not.empty() ? "it fell out of sync" : known.why_not);
}

void Replication::TakeOver(const Lease::State& state) {
  absl::MutexLock change(&change_mu_);
  std::shared_ptr<Follower> follower;
  {
    absl::MutexLock lock(&mu_);
    follower = follower_;
  }
  const uint64_t known = std::max({follower->state().epoch, state.last_epoch, data_->role().epoch});
  const uint64_t next = NextTerm(std::max(epoch(), known));
  const uint64_t own = std::max({epoch(), follower->state().epoch, data_->role().epoch});
  absl::Status status;
  if (!CredibleAfter(own, state.last_epoch)) {
    status =
        absl::FailedPreconditionError(absl::StrFormat("the lease says that epoch %d was the last, and this server "
                                                      "knows %d: that is no epoch of its servers; put right "
                                                      "what the lease says",
                                                      state.last_epoch, own));
  }
  const bool stopped = status.ok();
  if (stopped) {
    follower->Stop();  // what it has is not replaced from here on
    const std::string heard = WhyNotEligible(state);
    if (!heard.empty()) status = absl::UnavailableError(heard);
  }
  if (status.ok()) status = data_->RaiseEpoch(next);
  if (status.ok()) status = lease_->Announce(next);
  if (status.ok()) {
    {
      absl::MutexLock lock(&mu_);
      lost_sync_ = false;
    }
    registry_->ServeUntil(UntilOf(state));
    status = Serve(next, known);
  }
  if (!status.ok()) {
    spdlog::error("the lease is held, but this server cannot serve: {}", status.ToString());
    lease_->Release();
    registry_->ServeUntil(std::numeric_limits<TimeNs>::max());
  }
  if (stopped && !status.ok()) {
    // Of a later term only, as the directory has it now: the announcement may have been made.
    const FollowerState heard = follower->state();
    const absl::Status follows = StartFollower(heard.epoch, heard.in_sync);
    if (!follows.ok()) spdlog::error("this server does not follow until it can: {}", follows.ToString());
  }
  absl::MutexLock lock(&mu_);
  forced_ = false;
  if (status.ok()) wake_.SignalAll();
}

bool Replication::StandBy() {
  absl::MutexLock change(&change_mu_);
  const StoredRole stored = data_->role();
  registry_->ServeUntil(std::numeric_limits<TimeNs>::max());  // a standby shows nothing to workers, whoever holds it
  absl::Status status = registry_->BeginFollowing();
  if (status.ok()) status = StartFollower(stored.epoch);
  if (!status.ok()) {
    spdlog::error("this server cannot become a standby yet: {}", status.ToString());
    return false;
  }
  absl::MutexLock lock(&mu_);
  role_ = Role::kStandby;
  return true;
}

absl::StatusOr<uint64_t> Replication::PromoteByLease(bool force) {
  absl::MutexLock lock(&mu_);
  if (role_ == Role::kPrimary) return epoch();
  if (!force) {
    return absl::FailedPreconditionError(
        "the lease decides who is primary: stop the server that holds it, or give --force to let this one take it when "
        "it is free, whatever it lacks");
  }
  forced_ = true;
  wake_.SignalAll();
  const auto serves = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return role_ == Role::kPrimary || stop_; };
  if (mu_.AwaitWithTimeout(absl::Condition(&serves), absl::Milliseconds(2 * options_.lease_ttl_ms))) return epoch();
  return absl::DeadlineExceededError("the lease was not free; this server takes it once it is");
}

}  // namespace gradwire

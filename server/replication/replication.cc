// See replication.h.
#include "server/replication/replication.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "common/base/names.h"
#include "common/base/start_thread.h"
#include "common/base/status_macros.h"
#include "server/replication/epoch.h"

namespace gradwire {
namespace {

constexpr int64_t kFenceTimeoutMs = 2000;
constexpr absl::Duration kTellAgain = absl::Milliseconds(500);
// At that address there is a server of another lineage; the one that was replaced may come back to it.
constexpr absl::Duration kTellStrangerAgain = absl::Seconds(30);
constexpr size_t kMaxEnding = 16;  // feeds that were dropped and whose streams have not closed yet
constexpr int kMaxCopies = 4096;   // as many as there can be jobs

absl::Status NotServing(const std::string& why) { return absl::UnavailableError(why); }

}  // namespace

Replication::Replication(ReplicationOptions options, JobRegistry* registry, DataDirectory* data, Clock* clock)
    : options_(std::move(options)), registry_(registry), data_(data), clock_(clock) {
  share_.queue_limit_bytes = options_.standby_queue_bytes;
  share_.feeds = std::max<uint32_t>(options_.max_standbys, 1);
}

Replication::~Replication() { Stop(); }

absl::Status Replication::Start() {
  if (data_ == nullptr) {
    if (!options_.follow.empty()) {
      return absl::FailedPreconditionError("--follow needs --data-dir: a standby keeps durable jobs");
    }
    return EnsureLineage();  // of this start alone
  }
  if (!data_->lineage().none()) GW_RETURN_IF_ERROR(KeepLineage(data_->lineage()));
  registry_->SetOnChange([this] {
    for (const auto& feed : Feeds()) feed->JobsChanged();
  });
  const StoredRole stored = data_->role();
  if (options_.make_lease) {
    registry_->SetOnLostSync([this] {
      absl::MutexLock lock(&mu_);
      lost_sync_ = true;
      look_now_ = true;
      wake_.SignalAll();
    });
    // who serves is not for the directory to say
    GW_RETURN_IF_ERROR(registry_->Recover(/*following=*/true));
    absl::MutexLock lock(&mu_);
    role_ = Role::kStandby;
    return absl::OkStatus();
  }
  GW_ASSIGN_OR_RETURN(const std::vector<std::string> jobs, data_->Jobs());
  switch (stored.kind) {
    case StoredRole::Kind::kPrimary:
      if (!options_.follow.empty()) {
        spdlog::info("promoted before, so {} is not followed; it is told", options_.follow);
      }
      break;
    case StoredRole::Kind::kNone:
      if (options_.follow.empty()) break;
      if (!jobs.empty()) {
        return absl::FailedPreconditionError(absl::StrFormat(
            "--follow %s: the data directory '%s' has %d jobs that this server served itself, and following would "
            "replace them: give an empty --data-dir, or leave --follow out; a primary that was replaced runs without "
            "it "
            "until it is fenced, then it may follow",
            options_.follow, data_->path(), jobs.size()));
      }
      return StartAsStandby(stored);
    case StoredRole::Kind::kStandby:
      if (!options_.follow.empty()) return StartAsStandby(stored);
      return absl::FailedPreconditionError(absl::StrFormat(
          "the data directory '%s' is that of a standby: start with --follow and its primary's address, and promote it "
          "with `gradwire promote` if that is gone",
          data_->path()));
    case StoredRole::Kind::kFenced:
      if (!options_.follow.empty()) return StartAsStandby(stored);
      GW_RETURN_IF_ERROR(registry_->Recover(/*following=*/true));
      absl::MutexLock change(&change_mu_);
      FenceBy(stored.epoch, stored.name);
      return absl::OkStatus();
  }
  GW_RETURN_IF_ERROR(EnsureLineage());
  return registry_->Recover(/*following=*/false);
}

absl::Status Replication::EnsureLineage() {
  return lineage().none() ? KeepLineage(Lineage::Random()) : absl::OkStatus();
}

absl::Status Replication::Adopt(const Lineage& lineage) {
  const Lineage own = this->lineage();
  if (!own.none()) {
    GW_ASSIGN_OR_RETURN(const std::vector<std::string> jobs, data_->Jobs());
    if (!jobs.empty()) {
      return absl::FailedPreconditionError(absl::StrFormat(
          "it is of another lineage (%016x) than the %d jobs in the data directory '%s' (%016x), which following would "
          "replace: point --follow at their primary, or start with an empty --data-dir",
          lineage.id(), jobs.size(), data_->path(), own.id()));
    }
  }
  return KeepLineage(lineage);
}

absl::Status Replication::KeepLineage(const Lineage& lineage) {
  if (data_ != nullptr && !data_->lineage().SameAs(lineage)) GW_RETURN_IF_ERROR(data_->SetLineage(lineage));
  *registry_->environment().server_lineage = lineage.id();
  absl::MutexLock lock(&mu_);
  lineage_ = lineage;
  return absl::OkStatus();
}

Lineage Replication::lineage() const {
  absl::MutexLock lock(&mu_);
  return lineage_;
}

absl::Status Replication::StartAsStandby(const StoredRole& stored) {
  StoredRole role = stored;
  if (stored.kind == StoredRole::Kind::kNone) {
    role.kind = StoredRole::Kind::kStandby;
    GW_RETURN_IF_ERROR(data_->SetRole(role));
  }
  GW_RETURN_IF_ERROR(registry_->Recover(/*following=*/true));
  absl::MutexLock lock(&mu_);
  role_ = Role::kStandby;
  return absl::OkStatus();
}

absl::Status Replication::Run(const std::string& name, std::function<void(bool)> on_serving) {
  name_ = name;
  const bool serving = CheckServing().ok();
  {
    absl::MutexLock change(&change_mu_);
    on_serving_ = std::move(on_serving);
    on_serving_(serving);
  }
  if (options_.follow.empty() || data_ == nullptr || role() == Role::kFenced) return absl::OkStatus();
  if (serving) {  // promoted before
    absl::MutexLock change(&change_mu_);
    TellLater(epoch());
    return absl::OkStatus();
  }
  GW_RETURN_IF_ERROR(StartFollower(data_->role().epoch));
  if (!options_.make_lease) return absl::OkStatus();
  GW_ASSIGN_OR_RETURN(lease_, options_.make_lease(name));
  GW_ASSIGN_OR_RETURN(lease_thread_, StartThread("the lease", [this] { HoldLease(); }));
  return absl::OkStatus();
}

absl::Status Replication::StartFollower(uint64_t known_epoch, bool in_sync) {
  FollowerOptions options;
  options.primary = options_.follow;
  options.name = name_;
  options.known_epoch = known_epoch;
  options.in_sync = in_sync;
  if (options_.make_lease) options.least_term = TermOf(data_->epoch());
  options.lineage = lineage();
  options.adopt = [this](const Lineage& lineage) { return Adopt(lineage); };
  options.timeout_ms = options_.follower_timeout_ms;
  options.dial = options_.dial;
  options.thread = options_.threads;
  auto follower = std::make_shared<Follower>(std::move(options), registry_, clock_);
  GW_RETURN_IF_ERROR(follower->Start());
  absl::MutexLock lock(&mu_);
  follower_.swap(follower);  // the one before ends without the lock
  return absl::OkStatus();
}

void Replication::Stop() {
  {
    absl::MutexLock change(&change_mu_);
    on_serving_ = [](bool) {};
  }
  {
    absl::MutexLock lock(&mu_);
    stop_ = true;
    wake_.SignalAll();
  }
  if (lease_thread_.joinable()) lease_thread_.join();
  std::shared_ptr<Follower> follower;
  {
    absl::MutexLock lock(&mu_);
    follower = follower_;
  }
  if (follower != nullptr) follower->Stop();
  if (teller_.joinable()) teller_.join();
}

absl::Status Replication::CheckServing() const {
  absl::MutexLock lock(&mu_);
  switch (role_) {
    case Role::kPrimary:
      return absl::OkStatus();
    case Role::kStandby:
      return NotServing(
          absl::StrFormat("this server is a standby of %s: ask there, or promote this one with "
                          "`gradwire promote`",
                          options_.follow));
    case Role::kFenced:
      return NotServing(fenced_why_);
  }
  return absl::OkStatus();
}

absl::Status Replication::CheckNotReplaced(uint64_t epoch, uint64_t lineage) const {
  if (lineage != *registry_->environment().server_lineage || epoch <= this->epoch()) return absl::OkStatus();
  if (TermOf(epoch) > TermOf(this->epoch())) {
    return NotServing(absl::StrFormat(
        "the caller knows a server of epoch %s, which has replaced this one of epoch %s: ask there; if there is none, "
        "the caller is wrong",
        EpochText(epoch), EpochText(this->epoch())));
  }
  return absl::FailedPreconditionError(
      absl::StrFormat("this server has epoch %d and was replaced by one of epoch %d, which the caller knows: stop this "
                      "server, or point the caller at the other one",
                      this->epoch(), epoch));
}

absl::Status Replication::CheckFence(const v1::FenceRequest& request) const {
  GW_RETURN_IF_ERROR(CheckServerName("the name of the server that has taken over", request.name()));
  if (data_ == nullptr) return absl::FailedPreconditionError("this server keeps nothing that another could take over");
  if (options_.make_lease) return absl::FailedPreconditionError("a lease says who is primary: nobody else fences it");
  const absl::StatusOr<Lineage> theirs = Lineage::OfKey(request.lineage_key());
  if (!theirs.ok() || !lineage().SameAs(*theirs)) {
    return absl::PermissionDeniedError(absl::StrFormat(
        "%s is not of this server's lineage: only a server that has followed this one can take over", request.name()));
  }
  if (request.server_epoch() > epoch() && CredibleAfter(epoch(), request.server_epoch())) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrFormat("this server has epoch %s, which %s of epoch %s cannot fence",
                                                       EpochText(epoch()), request.name(),
                                                       EpochText(request.server_epoch())));
}

absl::Status Replication::Fence(const v1::FenceRequest& request) {
  absl::MutexLock change(&change_mu_);
  if (const absl::Status refused = CheckFence(request); !refused.ok()) {
    registry_->WarnRefused("Fence", refused);
    return refused;
  }
  switch (role()) {
    case Role::kPrimary:
      FenceBy(request.server_epoch(), request.name());
      return absl::OkStatus();
    case Role::kStandby:
      return absl::OkStatus();
    case Role::kFenced:
      break;
  }
  if (data_->role().epoch < request.server_epoch() || data_->role().name == request.name()) return absl::OkStatus();
  return absl::FailedPreconditionError(std::string(CheckServing().message()));
}

Replication::Role Replication::role() const {
  absl::MutexLock lock(&mu_);
  return role_;
}

void Replication::FenceBy(uint64_t epoch, std::string_view name) {
  BecomeFenced(
      {StoredRole::Kind::kFenced, epoch, std::string(name)},
      absl::StrFormat("%s has taken over with epoch %s, this one has %s: ask there, or start this one again "
                      "with --follow to make it a standby",
                      name.empty() ? "another server" : std::string(name), EpochText(epoch), EpochText(this->epoch())));
}

void Replication::BecomeFenced(const StoredRole& by, const std::string& why) {
  const std::string said = "this server is fenced: " + why;
  {
    absl::MutexLock lock(&mu_);
    role_ = Role::kFenced;
    fenced_why_ = said;
    wake_.SignalAll();
  }
  spdlog::error("{}", said);
  registry_->FenceAll(NotServing(said));
  // To a standby this is the end of its primary, not of its being in sync: nothing was shown that it does not have.
  for (const auto& feed : Feeds()) feed->Drop(NotServing(said));
  on_serving_(false);
  const absl::Status stored = data_->SetRole(by);
  if (!stored.ok()) {
    spdlog::error("that this server is fenced could not be written down, do not start it again: {}", stored.ToString());
  }
}

absl::Status Replication::CallFence(transport::Channel& channel, uint64_t epoch) const {
  v1::FenceRequest request;
  request.set_server_epoch(epoch);
  request.set_name(name_);
  request.set_lineage_key(lineage().key());
  return channel.Call("gradwire.v1.Replication/Fence", request.SerializeAsString(), kFenceTimeoutMs).status();
}

absl::StatusOr<uint64_t> Replication::Promote(bool force) {
  if (options_.make_lease) return PromoteByLease(force);
  absl::MutexLock change(&change_mu_);
  std::shared_ptr<Follower> follower;
  {
    absl::MutexLock lock(&mu_);
    if (role_ == Role::kPrimary) return epoch();
    if (role_ == Role::kFenced) {
      return absl::FailedPreconditionError(absl::StrFormat(
          "%s. To make it serve what it has in spite of that: stop it, remove the file ROLE from its data directory, "
          "start it",
          fenced_why_));
    }
    follower = follower_;
  }
  if (follower == nullptr) return absl::FailedPreconditionError("this server is still starting: try again");
  const FollowerState known = follower->state();
  if (!force && !known.in_sync) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "this server may lack versions that workers have seen: %s. Wait until `gradwire shard describe` says that it "
        "is in sync, or promote it with --force",
        known.why_not));
  }
  const uint64_t next = NextTerm(std::max(epoch(), known.epoch));
  const absl::Status told = CallFence(follower->channel(), next);
  if (absl::IsFailedPrecondition(told) && !force) return told;
  if (!told.ok()) spdlog::warn("{} could not be told that it is replaced: {}", options_.follow, told.ToString());
  follower->Stop();
  GW_RETURN_IF_ERROR(Serve(next, known.epoch));
  if (!told.ok()) TellLater(next);
  return next;
}

absl::Status Replication::Serve(uint64_t epoch, uint64_t known_epoch) {
  GW_RETURN_IF_ERROR(EnsureLineage());
  GW_RETURN_IF_ERROR(data_->RaiseEpoch(epoch));
  GW_RETURN_IF_ERROR(data_->SetRole({StoredRole::Kind::kPrimary, known_epoch, ""}));
  registry_->environment().epochs->Begin(epoch);
  registry_->EndFollowing();
  {
    absl::MutexLock lock(&mu_);
    role_ = Role::kPrimary;
    follower_ = nullptr;
    wake_.SignalAll();
  }
  spdlog::info("promoted: epoch {}", EpochText(epoch));
  on_serving_(true);
  return absl::OkStatus();
}

void Replication::TellLater(uint64_t epoch) {
  if (!options_.threads) {
    next_tell_ = clock_->Now();
    return;
  }
  if (teller_.joinable()) teller_.join();
  absl::StatusOr<std::thread> teller = StartThread("fencing", [this, epoch] { TellUntilAnswered(epoch); });
  if (!teller.ok()) {
    return spdlog::warn("{} is not told that it is replaced: {}", options_.follow, teller.status().ToString());
  }
  teller_ = *std::move(teller);
}

absl::Duration Replication::TellOnce(transport::Channel& channel, uint64_t epoch) {
  const absl::Status answer = CallFence(channel, epoch);
  if (answer.ok()) spdlog::info("{} is fenced", options_.follow);
  if (answer.ok() || absl::IsFailedPrecondition(answer)) return absl::InfiniteDuration();
  return absl::IsPermissionDenied(answer) ? kTellStrangerAgain : kTellAgain;
}

void Replication::TellUntilAnswered(uint64_t epoch) {
  const auto channel = options_.dial(options_.follow);
  if (!channel.ok()) return;
  for (;;) {
    const absl::Duration pause = TellOnce(**channel, epoch);
    if (pause == absl::InfiniteDuration()) return;
    absl::MutexLock lock(&mu_);
    if (!stop_) wake_.WaitWithTimeout(&mu_, pause);
    if (stop_ || role_ != Role::kPrimary) return;
  }
}

TimeNs Replication::TakeTurns() {
  TimeNs next = std::numeric_limits<TimeNs>::max();
  for (const auto& feed : Feeds()) next = std::min(next, feed->TakeTurn());
  std::shared_ptr<Follower> follower;
  {
    absl::MutexLock lock(&mu_);
    follower = follower_;
  }
  const TimeNs now = clock_->Now();
  if (follower != nullptr) {
    if (now >= next_follow_ || follower->ended()) next_follow_ = now + absl::ToInt64Nanoseconds(follower->TakeTurn());
    next = std::min(next, next_follow_);
  }
  if (next_tell_ && role() != Role::kPrimary) next_tell_.reset();
  if (next_tell_ && now >= *next_tell_) {
    const auto channel = options_.dial(options_.follow);
    const absl::Duration pause = channel.ok() ? TellOnce(**channel, epoch()) : absl::InfiniteDuration();
    next_tell_.reset();
    if (pause != absl::InfiniteDuration()) next_tell_ = now + absl::ToInt64Nanoseconds(pause);
  }
  return next_tell_ ? std::min(next, *next_tell_) : next;
}

void Replication::Describe(v1::ShardStatus* status) const {
  absl::MutexLock lock(&mu_);
  status->set_server_epoch(epoch());
  status->set_first_epoch(registry_->environment().epochs->first());
  status->set_lineage(lineage_.id());
  if (role_ == Role::kFenced) {
    status->set_fenced(true);
    status->set_fenced_why(fenced_why_);
  }
  if (role_ == Role::kStandby) status->set_following(options_.follow);
}

absl::StatusOr<std::shared_ptr<Feed>> Replication::Admit(const v1::FollowOpen& open, std::shared_ptr<Outbox> out) {
  GW_RETURN_IF_ERROR(CheckServing());
  GW_RETURN_IF_ERROR(CheckServerName("the standby's name", open.name()));
  GW_RETURN_IF_ERROR(CheckNotReplaced(open.known_epoch(), open.lineage()));
  if (open.copies_size() > kMaxCopies) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the standby has copies of %d jobs; at most %d are possible", open.copies_size(), kMaxCopies));
  }
  if (data_ == nullptr) {
    return absl::FailedPreconditionError("this server has no --data-dir: it has no durable jobs to follow");
  }
  FeedOptions options;
  options.name = open.name();
  options.timeout_ms = options_.follower_timeout_ms;
  options.share = &share_;
  options.lineage = lineage();
  options.thread = options_.threads;
  options.copies.assign(open.copies().begin(), open.copies().end());
  auto feed = std::make_shared<Feed>(std::move(options), registry_, clock_, std::move(out));
  std::vector<std::shared_ptr<Feed>> others;  // released without the lock: the last one to do so waits for its thread
  absl::MutexLock lock(&mu_);
  if (role_ != Role::kPrimary) return NotServing(fenced_why_);
  std::erase_if(feeds_, [](const auto& f) { return f.expired(); });
  for (const auto& weak : feeds_) {
    if (auto other = weak.lock()) others.push_back(std::move(other));
  }
  const size_t following = static_cast<size_t>(
      std::count_if(others.begin(), others.end(), [](const auto& other) { return !other->over(); }));
  if (following >= options_.max_standbys || feeds_.size() >= options_.max_standbys + kMaxEnding) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("this server has %d standbys (%d more are ending) and --max-standbys is %d: stop one, or start "
                        "this server with a "
                        "larger number",
                        following, feeds_.size() - following, options_.max_standbys));
  }
  feeds_.push_back(feed);
  return feed;
}

std::vector<std::shared_ptr<Feed>> Replication::Feeds() {
  absl::MutexLock lock(&mu_);
  std::vector<std::shared_ptr<Feed>> feeds;
  for (const auto& weak : feeds_) {
    if (auto feed = weak.lock()) feeds.push_back(std::move(feed));
  }
  return feeds;
}

void Replication::Tick() {
  if (clock_->Now() >= registry_->serve_until()) {
    absl::MutexLock change(&change_mu_);
    if (role() == Role::kPrimary && clock_->Now() >= registry_->serve_until()) {
      BecomeFenced({StoredRole::Kind::kFenced, epoch(), ""}, "its lease has ended and could not be renewed");
    }
  }
  for (const auto& feed : Feeds()) feed->Tick();
}

}  // namespace gradwire

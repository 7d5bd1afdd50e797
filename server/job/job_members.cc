// Who takes part in a job, its streams, and its time; see job_shard.h.
#include <spdlog/spdlog.h>

#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/job/round_mode.h"
#include "server/job/job_shard.h"

namespace gradwire {

absl::StatusOr<v1::JoinReply> JobShard::Join(const v1::WorkerIdentity& identity, uint64_t not_before,
                                             bool may_initialize, uint64_t other_version) {
  RoundActions actions;
  absl::StatusOr<Rounds::JoinOutcome> outcome;
  uint64_t version = 0;
  {
    absl::MutexLock lock(&mu_);
    GW_RETURN_IF_ERROR(shut_);
    version = machine_.round();
    const absl::Status not_behind = CheckNotBehind(other_version);
    if (not_behind.ok()) {
      GW_RETURN_IF_ERROR(CheckNameFree(identity));
      outcome = machine_.Join(identity.worker(), identity.incarnation(), not_before, may_initialize,
                              environment_.clock->Now(), &actions);
    } else {
      outcome = not_behind;
      // It joined before it knew of the others.
      const absl::StatusOr<MemberId> member = FindMember(identity);
      if (member.ok()) machine_.Leave(*member, environment_.clock->Now(), &actions);
    }
    if (outcome.ok()) totals_[outcome->id];
    used_ = environment_.clock->Now();
    NoteGone(actions.lost, not_behind.ok() ? "was started anew, and replaced" : "left: this shard is behind");
  }
  Run(actions);
  GW_RETURN_IF_ERROR(outcome.status());
  spdlog::info("job {} worker {} joined, incarnation {:016x}, starts at round {}{}", identity.job(), identity.worker(),
               identity.incarnation(), outcome->start_version, outcome->must_initialize ? ", initializes" : "");
  v1::JoinReply reply = ReplyTo(*outcome);
  reply.set_version(version);
  return reply;
}

absl::Status JobShard::CheckNameFree(const v1::WorkerIdentity& identity) const {
  for (const auto& [id, member] : machine_.membership().members()) {
    if (member.worker != identity.worker() || member.incarnation == identity.incarnation()) continue;
    if (!streams_.contains(id)) return absl::OkStatus();
    return absl::AlreadyExistsError(absl::StrFormat(
        "job '%s': worker '%s' is here and connected, incarnation %016x: every worker needs a name of its own; one that "
        "was lost without its connection ending is replaced when its lease of %d ms has ended",
        identity.job(), identity.worker(), member.incarnation, job_.spec().lease_ms()));
  }
  return absl::OkStatus();
}

void JobShard::NoteGone(const std::vector<Member>& gone, const std::string& why) {
  for (const Member& member : gone) {
    ++gone_;
    last_gone_ = absl::StrFormat("worker '%s' %s", member.worker, why);
    spdlog::info("job {} worker {} incarnation {:016x} {}; {} workers stay", job_.spec().name(), member.worker,
                 member.incarnation, why, machine_.membership().members().size());
  }
  if (!gone.empty()) used_ = environment_.clock->Now();
}

absl::Status JobShard::CheckNotBehind(uint64_t other_version) const {
  if (IsAsync(job_) || other_version <= machine_.round() + MostApart(job_)) return absl::OkStatus();
  return absl::DataLossError(absl::StrFormat(
      "job '%s': shard %d is at version %d%s, another shard is at version %d: this server lost what lies between, or "
      "has "
      "a copy of another time. Stop the servers and bring all shards to one version with `gradwire restore`, or delete "
      "the job",
      job_.spec().name(), shard_index_, machine_.round(), machine_.initialized() ? "" : " and has no parameters",
      other_version));
}

absl::StatusOr<v1::JoinReply> JobShard::Resume(const v1::WorkerIdentity& identity, const Rounds::ResumePoint& point) {
  RoundActions actions;
  absl::StatusOr<Rounds::JoinOutcome> outcome;
  {
    absl::MutexLock lock(&mu_);
    GW_RETURN_IF_ERROR(shut_);
    outcome = machine_.Resume(identity.worker(), identity.incarnation(), point, environment_.clock->Now(), &actions);
    if (outcome.ok()) totals_[outcome->id];
    used_ = environment_.clock->Now();
  }
  Run(actions);
  if (!outcome.ok()) {
    return absl::Status(outcome.status().code(),
                        absl::StrFormat("job '%s': %s", job_.spec().name(), std::string(outcome.status().message())));
  }
  const bool behind = outcome->start_version != point.round;
  spdlog::info("job {} worker {} is back, incarnation {:016x}, in round {}{}", identity.job(), identity.worker(),
               identity.incarnation(), point.round, behind ? ", which is over: it has to catch up" : "");
  return ReplyTo(*outcome);
}

absl::StatusOr<v1::JoinReply> JobShard::CatchUp(const v1::WorkerIdentity& identity, const Rounds::ResumePoint& point,
                                                uint64_t not_before) {
  RoundActions actions;
  absl::StatusOr<Rounds::JoinOutcome> outcome;
  {
    absl::MutexLock lock(&mu_);
    GW_RETURN_IF_ERROR(shut_);
    const absl::Status nothing_lost = machine_.CheckNothingLost(identity.worker(), point);
    outcome = nothing_lost.ok() ? machine_.CatchUp(identity.worker(), identity.incarnation(), not_before,
                                                   environment_.clock->Now(), &actions)
                                : nothing_lost;
    if (outcome.ok()) totals_[outcome->id];
    used_ = environment_.clock->Now();
  }
  Run(actions);
  if (!outcome.ok()) {
    return absl::Status(outcome.status().code(),
                        absl::StrFormat("job '%s': %s", job_.spec().name(), std::string(outcome.status().message())));
  }
  spdlog::info("job {} worker {} catches up, incarnation {:016x}, goes on with round {}", identity.job(),
               identity.worker(), identity.incarnation(), outcome->start_version);
  return ReplyTo(*outcome);
}

v1::JoinReply JobShard::ReplyTo(const Rounds::JoinOutcome& outcome) {
  v1::JoinReply reply;
  reply.set_start_version(outcome.start_version);
  reply.set_must_initialize(outcome.must_initialize);
  reply.set_waiting_for_workers(outcome.waiting_for_workers);
  reply.set_lease_ms(job_.spec().lease_ms());
  reply.set_server_epoch(*environment_.server_epoch);
  reply.set_lineage(*environment_.server_lineage);
  absl::MutexLock lock(&mu_);
  reply.set_members(static_cast<uint32_t>(machine_.membership().members().size()));
  reply.set_gone(gone_);
  return reply;
}

absl::StatusOr<MemberId> JobShard::FindMember(const v1::WorkerIdentity& identity) {
  GW_RETURN_IF_ERROR(shut_);
  absl::StatusOr<MemberId> member = machine_.membership().Find(identity.worker(), identity.incarnation());
  if (!member.ok()) {
    return absl::Status(member.status().code(),
                        absl::StrFormat("job '%s': %s", job_.spec().name(), std::string(member.status().message())));
  }
  return member;
}

void JobShard::NoteSanitized(MemberId member, uint64_t elements) {
  const auto totals = totals_.find(member);
  if (totals == totals_.end() || elements <= totals->second.sanitized_elements) return;
  sanitized_elements_ += elements - totals->second.sanitized_elements;
  totals->second.sanitized_elements = elements;
}

absl::StatusOr<v1::HeartbeatReply> JobShard::Heartbeat(const v1::HeartbeatRequest& request) {
  RoundActions actions;  // an election closes and opens nothing
  absl::MutexLock lock(&mu_);
  GW_ASSIGN_OR_RETURN(const MemberId member, FindMember(request.identity()));
  machine_.Renew(member, environment_.clock->Now());
  machine_.SetMayInitialize(member, request.may_initialize(), &actions);
  NoteSanitized(member, request.sanitized_elements());
  v1::HeartbeatReply reply;
  reply.set_round(machine_.round());
  reply.set_members(static_cast<uint32_t>(machine_.membership().members().size()));
  reply.set_must_initialize(machine_.MustInitialize(member));
  reply.set_gone(gone_);
  reply.set_last_gone(last_gone_);
  return reply;
}

absl::Status JobShard::Leave(const v1::LeaveRequest& request) {
  RoundActions actions;
  std::vector<std::shared_ptr<Outbox>> unread;
  MemberId member = 0;
  {
    absl::MutexLock lock(&mu_);
    GW_ASSIGN_OR_RETURN(member, FindMember(request.identity()));
    NoteSanitized(member, request.sanitized_elements());
    machine_.Leave(member, environment_.clock->Now(), &actions);
    NoteGone(actions.lost, "left");
    // The worker closes its streams itself: what it has sent is still answered.
    const auto [begin, end] = streams_.equal_range(member);
    std::vector<std::shared_ptr<Outbox>> left;
    for (auto it = begin; it != end; ++it) left.push_back(it->second);
    streams_.erase(begin, end);
    unread = NoteDeparted(left);
  }
  ForgetAddresses(member);
  for (const auto& stream : unread) stream->Cancel();
  Run(actions);
  return absl::OkStatus();
}

void JobShard::Tick(WorkPool* pool) {
  RoundActions actions;
  const TimeNs now = environment_.clock->Now();
  {
    absl::MutexLock lock(&mu_);
    machine_.Tick(now, &actions);
    NoteGone(actions.lost, absl::StrFormat("gave no sign of life for %d ms", job_.spec().lease_ms()));
  }
  for (const WarningLimiter::Count& more : refusals_.TakeEnded(now)) {
    spdlog::warn("job {}: {} more frames refused with {} within 10 s", job_.spec().name(), more.warnings,
                 absl::StatusCodeToString(more.kind));
  }
  for (const Member& member : actions.lost) {
    spdlog::warn("job {} worker {}: no sign of life for {} ms, no longer waited for", job_.spec().name(), member.worker,
                 job_.spec().lease_ms());
  }
  if (pool == nullptr || actions.close.empty()) return Run(actions);
  // Other jobs' leases do not wait until these buckets are closed.
  pool->Do([self = shared_from_this(), actions = std::move(actions)] { self->Run(actions); });
}

void JobShard::WarnRefused(absl::StatusCode kind, const std::string& message) {
  if (refusals_.Admit(kind, environment_.clock->Now())) spdlog::warn("refused: {}", message);
}

std::optional<TimeNs> JobShard::NextTick() {
  absl::MutexLock lock(&mu_);
  next_tick_ = machine_.NextTick();
  return next_tick_;
}

bool JobShard::TickIsSooner() {
  const std::optional<TimeNs> next = machine_.NextTick();
  if (!next || (next_tick_ && *next_tick_ <= *next)) return false;
  next_tick_ = next;
  return true;
}

absl::StatusOr<MemberId> JobShard::Attach(const v1::WorkerIdentity& identity, std::shared_ptr<Outbox> out) {
  absl::MutexLock lock(&mu_);
  GW_ASSIGN_OR_RETURN(const MemberId member, FindMember(identity));
  if (streams_.count(member) >= kMaxStreamsPerMember) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("job '%s' worker '%s': it has %d streams open, at most %d may be: end one first",
                        job_.spec().name(), identity.worker(), streams_.count(member), kMaxStreamsPerMember));
  }
  std::shared_ptr<UnsentBudget>& unsent = totals_[member].unsent;
  if (unsent == nullptr) unsent = std::make_shared<UnsentBudget>(unsent_limit_bytes_);
  out->CountInto(unsent);
  machine_.Renew(member, environment_.clock->Now());
  streams_.emplace(member, std::move(out));
  return member;
}

void JobShard::Detach(MemberId member, const std::shared_ptr<Outbox>& out) {
  for (const auto& bucket : buckets_) {
    absl::MutexLock lock(&bucket->mu);
    std::erase_if(bucket->waiting, [&](const Waiter& w) { return w.out == out; });
  }
  absl::MutexLock lock(&mu_);
  const auto [begin, end] = streams_.equal_range(member);
  for (auto it = begin; it != end; ++it) {
    if (it->second != out) continue;
    streams_.erase(it);
    return;
  }
}

void JobShard::DropMember(const Member& member) {
  for (const auto& bucket : buckets_) {
    absl::MutexLock lock(&bucket->mu);
    for (OpenRound& open : bucket->open) AbandonPartial(*bucket, open, member.id);
  }
  std::vector<std::shared_ptr<Outbox>> streams;
  std::vector<std::shared_ptr<Outbox>> unread;
  absl::Status why;
  {
    absl::MutexLock lock(&mu_);
    if (machine_.membership().Get(member.id) != nullptr) return;  // it has joined again since
    const absl::Status gone = machine_.membership().Find(member.worker, member.incarnation).status();
    why = absl::Status(gone.code(), absl::StrFormat("job '%s': %s", job_.spec().name(), std::string(gone.message())));
    const auto [begin, end] = streams_.equal_range(member.id);
    for (auto it = begin; it != end; ++it) streams.push_back(it->second);
    streams_.erase(begin, end);
    totals_.erase(member.id);
    unread = NoteDeparted(streams);
  }
  ForgetAddresses(member.id);
  for (const auto& stream : streams) stream->Finish(why);
  for (const auto& stream : unread) stream->Cancel();
}

std::vector<std::shared_ptr<Outbox>> JobShard::NoteDeparted(const std::vector<std::shared_ptr<Outbox>>& streams) {
  departed_.insert(departed_.end(), streams.begin(), streams.end());
  std::erase_if(departed_, [](const std::weak_ptr<Outbox>& stream) { return stream.expired(); });
  std::vector<std::shared_ptr<Outbox>> unread;
  for (; departed_.size() > kMaxDepartedStreams; departed_.pop_front()) {
    if (std::shared_ptr<Outbox> stream = departed_.front().lock()) unread.push_back(std::move(stream));
  }
  return unread;
}

}  // namespace gradwire

// Who takes part in a job, its streams, and its time; see job_shard.h.
#include <spdlog/spdlog.h>

#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/out_of_memory.h"
#include "common/base/status_macros.h"
#include "server/job/job_shard.h"

namespace gradwire {
namespace {

absl::Status CheckNotBehind(const JobParts& parts, uint64_t other_version) ABSL_EXCLUSIVE_LOCKS_REQUIRED(parts.mu) {
  const std::optional<uint64_t> most_apart = parts.rounds->MostApart();
  if (!most_apart || other_version <= parts.rounds->round() + *most_apart) return absl::OkStatus();
  const std::string_view remedy =
      parts.job.durable()
          ? "Stop the servers and bring all shards to one version with `gradwire restore`, or delete the job"
          : "The job's durability is none, so nothing can bring it back: delete it and begin anew (exist=\"new\" does "
            "both)";
  return absl::DataLossError(absl::StrFormat(
      "job '%s': shard %d is at version %d%s, another shard is at version %d: this server lost what lies between, or "
      "has a copy of another time. %s",
      parts.job.spec().name(), parts.shard_index, parts.rounds->round(),
      parts.rounds->initialized() ? "" : " and has no parameters", other_version, std::string(remedy)));
}

absl::Status ReplacedError(const v1::WorkerIdentity& identity) {
  return absl::FailedPreconditionError(absl::StrFormat(
      "job '%s': another process goes on from the checkpoint of worker '%s', incarnation %016x, and has "
      "taken the place of this one: stop one of the two",
      identity.job(), identity.worker(), identity.incarnation()));
}

}  // namespace

absl::Status JobShard::InJob(const absl::Status& status) const {
  return absl::Status(status.code(),
                      absl::StrFormat("job '%s': %s", parts_.job.spec().name(), std::string(status.message())));
}

absl::Status JobShard::CheckInstance(uint64_t known) const {
  if (known == 0 || instance_ == 0 || known == instance_) return absl::OkStatus();
  return InJob(absl::FailedPreconditionError(
      "the job that this worker was in was deleted, and this is another one of its name, which goes on from other "
      "parameters: start the worker again, without its checkpoint, and it joins this one"));
}

absl::StatusOr<MemberId> JobShard::FindMember(const v1::WorkerIdentity& identity) const {
  GW_RETURN_IF_ERROR(parts_.shut);
  absl::StatusOr<MemberId> member = parts_.rounds->membership().Find(identity.worker(), identity.incarnation());
  if (!member.ok()) return InJob(member.status());
  if (sessions_.WasReplaced(*member, identity.session())) return ReplacedError(identity);
  if (!sessions_.Is(*member, identity.session())) {
    return absl::NotFoundError(absl::StrFormat(
        "job '%s': another process joined from the checkpoint of worker '%s', incarnation %016x: join again",
        parts_.job.spec().name(), identity.worker(), identity.incarnation()));
  }
  return member;
}

absl::Status JobShard::CheckOneSession(const v1::WorkerIdentity& identity) const {
  const MemberId member = MakeMemberId(identity.worker(), identity.incarnation());
  if (sessions_.WasReplaced(member, identity.session())) return ReplacedError(identity);
  if (!streams_.Has(member) || sessions_.Is(member, identity.session())) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrFormat(
      "job '%s': worker '%s' is here and connected, and another process goes on from the same checkpoint, incarnation "
      "%016x: each worker resumes from a checkpoint of its own. One that was lost without its connection ending is "
      "replaced when its lease of %d ms has ended",
      parts_.job.spec().name(), identity.worker(), identity.incarnation(), parts_.job.spec().lease_ms()));
}

void JobShard::NoteJoined(const v1::WorkerIdentity& identity, MemberId member) {
  sessions_.Joined(member, identity.session(), [this](MemberId other) ABSL_EXCLUSIVE_LOCKS_REQUIRED(parts_.mu) {
    return parts_.rounds->membership().Get(other) != nullptr;
  });
  parts_.traffic.Open(member);
}

absl::StatusOr<v1::JoinReply> JobShard::Join(const v1::WorkerIdentity& identity, uint64_t not_before,
                                             bool may_initialize, uint64_t other_version) {
  RoundActions actions;
  absl::StatusOr<Rounds::JoinOutcome> outcome;
  uint64_t version = 0;
  {
    absl::MutexLock lock(&parts_.mu);
    GW_RETURN_IF_ERROR(parts_.shut);
    version = parts_.rounds->round();
    const absl::Status not_behind = CheckNotBehind(parts_, other_version);
    if (not_behind.ok()) {
      GW_RETURN_IF_ERROR(CheckNameFree(identity));
      GW_RETURN_IF_ERROR(CheckOneSession(identity));
      outcome = parts_.rounds->Join(identity.worker(), identity.incarnation(), not_before, may_initialize,
                                    parts_.NowOfRounds(), &actions);
    } else {
      outcome = not_behind;
      // It joined before it knew of the others.
      const absl::StatusOr<MemberId> member = FindMember(identity);
      if (member.ok()) parts_.rounds->Leave(*member, parts_.NowOfRounds(), &actions);
    }
    if (outcome.ok()) NoteJoined(identity, outcome->id);
    attendance_.NoteCame(parts_.environment.clock->Now());
    NoteGone(actions.lost, not_behind.ok() ? "was started anew, and replaced" : "left: this shard is behind");
  }
  Run(std::move(actions));
  GW_RETURN_IF_ERROR(outcome.status());
  spdlog::info("job {} worker {} joined, incarnation {:016x}, starts at round {}{}", identity.job(), identity.worker(),
               identity.incarnation(), outcome->start_version, outcome->must_initialize ? ", initializes" : "");
  v1::JoinReply reply = ReplyTo(*outcome);
  reply.set_version(version);
  return reply;
}

absl::Status JobShard::CheckNameFree(const v1::WorkerIdentity& identity) const {
  for (const auto& [id, member] : parts_.rounds->membership().members()) {
    if (member.worker != identity.worker() || member.incarnation == identity.incarnation()) continue;
    if (!streams_.Has(id)) return absl::OkStatus();
    return absl::AlreadyExistsError(
        absl::StrFormat("job '%s': worker '%s' is here and connected, incarnation %016x: every worker needs a name of "
                        "its own; one that "
                        "was lost without its connection ending is replaced when its lease of %d ms has ended",
                        identity.job(), identity.worker(), member.incarnation, parts_.job.spec().lease_ms()));
  }
  return absl::OkStatus();
}

void JobShard::NoteGone(const std::vector<Member>& gone, const std::string& why) {
  for (const Member& member : gone) {
    attendance_.NoteGone(absl::StrFormat("worker '%s' %s", member.worker, why), parts_.environment.clock->Now());
    spdlog::info("job {} worker {} incarnation {:016x} {}; {} workers stay", parts_.job.spec().name(), member.worker,
                 member.incarnation, why, parts_.rounds->membership().members().size());
  }
}

absl::StatusOr<v1::JoinReply> JobShard::Resume(const v1::WorkerIdentity& identity, const Rounds::ResumePoint& point) {
  RoundActions actions;
  absl::StatusOr<Rounds::JoinOutcome> outcome;
  {
    absl::MutexLock lock(&parts_.mu);
    GW_RETURN_IF_ERROR(parts_.shut);
    GW_RETURN_IF_ERROR(CheckOneSession(identity));
    outcome = parts_.rounds->Resume(identity.worker(), identity.incarnation(), point, parts_.NowOfRounds(), &actions);
    if (outcome.ok()) NoteJoined(identity, outcome->id);
    attendance_.NoteCame(parts_.environment.clock->Now());
  }
  Run(std::move(actions));
  if (!outcome.ok()) return InJob(outcome.status());
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
    absl::MutexLock lock(&parts_.mu);
    GW_RETURN_IF_ERROR(parts_.shut);
    GW_RETURN_IF_ERROR(CheckOneSession(identity));
    const absl::Status nothing_lost = parts_.rounds->CheckNothingLost(identity.worker(), point);
    outcome = nothing_lost.ok() ? parts_.rounds->CatchUp(identity.worker(), identity.incarnation(), not_before,
                                                         parts_.NowOfRounds(), &actions)
                                : nothing_lost;
    if (outcome.ok()) NoteJoined(identity, outcome->id);
    attendance_.NoteCame(parts_.environment.clock->Now());
  }
  Run(std::move(actions));
  if (!outcome.ok()) return InJob(outcome.status());
  spdlog::info("job {} worker {} catches up, incarnation {:016x}, goes on with round {}", identity.job(),
               identity.worker(), identity.incarnation(), outcome->start_version);
  return ReplyTo(*outcome);
}

v1::JoinReply JobShard::ReplyTo(const Rounds::JoinOutcome& outcome) {
  v1::JoinReply reply;
  reply.set_start_version(outcome.start_version);
  reply.set_must_initialize(outcome.must_initialize);
  reply.set_waiting_for_workers(outcome.waiting_for_workers);
  reply.set_lease_ms(parts_.job.spec().lease_ms());
  reply.set_server_epoch(parts_.environment.epochs->now());
  reply.set_lineage(*parts_.environment.server_lineage);
  reply.set_instance(instance_);
  absl::MutexLock lock(&parts_.mu);
  reply.set_members(static_cast<uint32_t>(parts_.rounds->membership().members().size()));
  reply.set_gone(attendance_.gone());
  return reply;
}

absl::StatusOr<v1::HeartbeatReply> JobShard::Heartbeat(const v1::HeartbeatRequest& request) {
  RoundActions actions;  // an election closes and opens nothing
  absl::MutexLock lock(&parts_.mu);
  GW_ASSIGN_OR_RETURN(const MemberId member, FindMember(request.identity()));
  parts_.rounds->Renew(member, parts_.environment.clock->Now());
  parts_.rounds->SetMayInitialize(member, request.may_initialize(), &actions);
  parts_.traffic.NoteSanitized(member, request.sanitized_elements());
  v1::HeartbeatReply reply;
  reply.set_round(parts_.rounds->round());
  reply.set_members(static_cast<uint32_t>(parts_.rounds->membership().members().size()));
  reply.set_must_initialize(parts_.rounds->MustInitialize(member));
  reply.set_gone(attendance_.gone());
  reply.set_last_gone(attendance_.last_gone());
  return reply;
}

absl::Status JobShard::Leave(const v1::LeaveRequest& request) {
  RoundActions actions;
  MemberStreams::Streams unread;
  MemberId member = 0;
  {
    absl::MutexLock lock(&parts_.mu);
    GW_ASSIGN_OR_RETURN(member, FindMember(request.identity()));
    parts_.traffic.NoteSanitized(member, request.sanitized_elements());
    parts_.rounds->Leave(member, parts_.NowOfRounds(), &actions);
    NoteGone(actions.lost, "left");
    // The worker closes its streams itself: what it has sent is still answered.
    streams_.Depart(member, &unread);
  }
  if (agreement() != nullptr) agreement()->exchange().ForgetAddresses(member);
  for (const auto& stream : unread) stream->Cancel();
  Run(std::move(actions));
  NoteAllLeft();
  return absl::OkStatus();
}

void JobShard::NoteAllLeft() {
  if (!log_.journals()) return;
  absl::MutexLock lock(&parts_.mu);  // who joins next is recorded behind it
  if (!parts_.shut.ok() || !parts_.rounds->initialized() || !parts_.rounds->membership().members().empty()) return;
  uint64_t made = 1;
  for (uint32_t b = 0; b < parts_.buckets.size(); ++b) made += parts_.rounds->NextVersionOf(b);
  if (attendance_.KnowsAllLeft(made)) return;  // who came since has added nothing to the journal
  // Only a hint: without it a server that is started again waits for their leases, as it does for the workers of a
  // round that is being closed meanwhile, which is recorded behind it.
  CatchBadAlloc("a record", [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(parts_.mu) {
    log_.Append({journal::RecordType::kKept, 0, parts_.rounds->round(), {}, {}}, [] {});
    attendance_.NoteAllLeft(made);
    return absl::OkStatus();
  }).IgnoreError();
}

void JobShard::Tick(TimeNs now, WorkPool* pool, TimeNs slept) {
  const auto actions = std::make_shared<RoundActions>();
  // What the rounds have decided is carried out, also where memory runs out meanwhile.
  const absl::Status ticked = CatchBadAlloc("a tick", [&] {
    absl::MutexLock lock(&parts_.mu);
    parts_.Excuse(slept, now);
    parts_.rounds->Tick(now, actions.get());
    NoteGone(actions->lost, absl::StrFormat("gave no sign of life for %d ms", parts_.job.spec().lease_ms()));
    return absl::OkStatus();
  });
  CatchBadAlloc("a warning", [&] {
    intake_.WarnOfHeldBack(now);
    if (!ticked.ok()) spdlog::warn("job {}: {}", parts_.job.spec().name(), ticked.ToString());
    for (const Member& member : actions->lost) {
      spdlog::warn("job {} worker {}: no sign of life for {} ms, no longer waited for", parts_.job.spec().name(),
                   member.worker, parts_.job.spec().lease_ms());
    }
    return absl::OkStatus();
  }).IgnoreError();
  // Other jobs' leases do not wait until these buckets are closed.
  if (pool != nullptr && !actions->close.empty() &&
      CatchBadAlloc("closing buckets", [&] {
        pool->Do([self = shared_from_this(), actions] { self->Run(std::move(*actions)); });
        return absl::OkStatus();
      }).ok()) {
    return;
  }
  Run(std::move(*actions));
}

std::optional<TimeNs> JobShard::NextTick() {
  absl::MutexLock lock(&parts_.mu);
  next_tick_ = parts_.rounds->NextTick();
  return next_tick_;
}

absl::Status JobShard::CheckAddresses(const std::vector<std::string>& addresses) {
  if (agreement() == nullptr || parts_.layout.shard_count() == 1) return absl::OkStatus();
  return agreement()->exchange().CheckAddresses(addresses);
}

void JobShard::SetAddresses(MemberId member, const std::vector<std::string>& addresses) {
  if (agreement() == nullptr || parts_.layout.shard_count() == 1) return;
  agreement()->exchange().SetAddresses(member, addresses);
  bool gone = false;  // since it joined
  {
    absl::MutexLock lock(&parts_.mu);
    gone = parts_.rounds->membership().Get(member) == nullptr;
  }
  if (gone) agreement()->exchange().ForgetAddresses(member);
}

absl::StatusOr<MemberId> JobShard::Attach(const v1::WorkerIdentity& identity, std::shared_ptr<Outbox> out) {
  absl::MutexLock lock(&parts_.mu);
  GW_ASSIGN_OR_RETURN(const MemberId member, FindMember(identity));
  if (streams_.CountOf(member) >= MemberStreams::kMaxPerMember) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "job '%s' worker '%s': it has %d streams open, at most %d may be: end one first", parts_.job.spec().name(),
        identity.worker(), streams_.CountOf(member), MemberStreams::kMaxPerMember));
  }
  parts_.rounds->Renew(member, parts_.environment.clock->Now());
  streams_.Attach(member, std::move(out));
  sessions_.Attached(identity.session());
  return member;
}

void JobShard::Detach(MemberId member, const std::shared_ptr<Outbox>& out) {
  desk_.Forget(out);
  absl::MutexLock lock(&parts_.mu);
  streams_.Detach(member, out);
}

void JobShard::DropMember(const Member& member) {
  {
    absl::MutexLock lock(&parts_.mu);
    // It has joined again since, and may have begun frames.
    if (parts_.rounds->membership().Get(member.id) != nullptr) return;
  }
  intake_.AbandonMember(member.id);
  MemberStreams::Streams streams, unread;
  absl::Status why;
  {
    absl::MutexLock lock(&parts_.mu);
    // Or meanwhile: its streams are those of one that is here.
    if (parts_.rounds->membership().Get(member.id) != nullptr) return;
    why = InJob(parts_.rounds->membership().Find(member.worker, member.incarnation).status());
    streams = streams_.Depart(member.id, &unread);
    streams_.Forget(member.id);
    parts_.traffic.Close(member.id);
  }
  if (agreement() != nullptr) agreement()->exchange().ForgetAddresses(member.id);
  for (const auto& stream : streams) stream->Finish(why);
  for (const auto& stream : unread) stream->Cancel();
}

}  // namespace gradwire

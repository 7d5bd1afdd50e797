// Putting a job together, and what concerns it as a whole; see job_shard.h.
#include "server/job/job_shard.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/out_of_memory.h"
#include "common/base/status_macros.h"
#include "server/job/make_job.h"
#include "server/job/spec_difference.h"

namespace gradwire {

JobShard::JobShard(std::unique_ptr<JobParts> parts)
    : owned_(std::move(parts)),
      parts_(*owned_),
      by_rounds_(MakeByRounds(&parts_)),
      desk_(&parts_, by_rounds_.answers.get()),
      snapshots_(&parts_),
      log_(&parts_, by_rounds_.past.get(), Agreement::IsNeededBy(parts_.job)),
      stages_(&parts_, by_rounds_.flow.get(), by_rounds_.past.get(), &snapshots_, &log_, &desk_),
      upload_(&parts_, &log_, &desk_),
      intake_(&parts_, by_rounds_.flow.get(), &upload_),
      recovery_(&parts_, by_rounds_.flow.get(), by_rounds_.past.get(), &snapshots_, &log_, &stages_),
      digest_(&parts_),
      streams_(parts_.unsent_limit_bytes),
      attendance_(parts_.environment.clock->Now()) {
  parts_.run = [this](RoundActions actions) { Run(std::move(actions)); };
  for (const auto& bucket : parts_.buckets) {
    absl::MutexLock lock(&bucket->mu);
    by_rounds_.flow->OpenNext(*bucket);
  }
}

JobShard::~JobShard() {
  stages_.Stop();
  log_.Stop();
}

absl::StatusOr<std::shared_ptr<JobShard>> JobShard::Make(const v1::JobSpec& spec, uint32_t shard_index,
                                                         uint32_t shard_count, const JobEnvironment& environment,
                                                         uint64_t layout_digest) {
  GW_ASSIGN_OR_RETURN(Job job, Job::Make(spec));
  return Make(std::move(job), shard_index, shard_count, environment, layout_digest);
}

absl::StatusOr<std::shared_ptr<JobShard>> JobShard::Make(Job job, uint32_t shard_index, uint32_t shard_count,
                                                         const JobEnvironment& environment, uint64_t layout_digest) {
  GW_ASSIGN_OR_RETURN(std::unique_ptr<JobParts> parts,
                      MakeJobParts(std::move(job), shard_index, shard_count, environment, layout_digest));
  std::shared_ptr<JobShard> shard(new JobShard(std::move(parts)));
  GW_RETURN_IF_ERROR(shard->stages_.Start());
  return shard;
}

absl::Status JobShard::CheckSame(const Job& job, uint32_t shard_index, uint32_t shard_count,
                                 uint64_t layout_digest) const {
  const std::string& name = parts_.job.spec().name();
  if (shard_count != parts_.layout.shard_count() || shard_index != parts_.shard_index) {
    return absl::FailedPreconditionError(
        absl::StrFormat("job '%s': this server is shard %d of %d, asked for as shard %d of %d: list the servers in the "
                        "same order everywhere",
                        name, parts_.shard_index, parts_.layout.shard_count(), shard_index, shard_count));
  }
  if (job.digest() != parts_.job.digest()) {
    return absl::FailedPreconditionError(
        absl::StrFormat("job '%s' exists here with another spec: %s. Use another name, or begin the job anew: "
                        "exist='new' in Python, or 'gradwire job delete'",
                        name, DescribeDifference(parts_.job.spec(), job.spec())));
  }
  return CheckLayoutDigest(parts_.job, parts_.layout, layout_digest);
}

void JobShard::Run(RoundActions actions) {
  for (const Member& member : actions.lost) {
    // One that is not told finds its round over, or its stream at an end, later.
    CatchBadAlloc("the end of a member", [&] {
      DropMember(member);
      return absl::OkStatus();
    }).IgnoreError();
  }
  for (RoundActions::Close& close : actions.close) {
    BucketState& bucket = *parts_.buckets[close.bucket];
    // Every bucket of the round is closed, whatever happens to the others.
    const absl::Status closed = CatchBadAlloc("closing a bucket", [&] {
      ClosedBucket passing;
      passing.bucket = &bucket;
      passing.close = std::move(close);
      stages_.Pass(std::move(passing));
      return absl::OkStatus();
    });
    if (closed.ok()) continue;
    absl::MutexLock lock(&bucket.mu);
    if (bucket.failure.ok()) bucket.failure = closed;
  }
  if (actions.opened && *actions.opened == 0) spdlog::info("job {}: round 0 opens", parts_.job.spec().name());
  if (parts_.job.spec().rounds().quorum() == 0 || !parts_.environment.tick_sooner) return;
  {
    absl::MutexLock lock(&parts_.mu);
    const std::optional<TimeNs> next = parts_.rounds->NextTick();
    if (!next || (next_tick_ && *next_tick_ <= *next)) return;
    next_tick_ = next;
  }
  parts_.environment.tick_sooner();
}

bool JobShard::HasParameters() const {
  absl::MutexLock lock(&parts_.mu);
  return parts_.rounds->initialized();
}

bool JobShard::Unused() const {
  absl::MutexLock lock(&parts_.mu);
  return !parts_.replaying && recovery_.version() == 0 && !parts_.rounds->initialized() &&
         parts_.rounds->membership().members().empty();
}

bool JobShard::RoundInProgress() const {
  absl::MutexLock lock(&parts_.mu);
  const Rounds::Status status = parts_.rounds->status();
  return parts_.shut.ok() && parts_.rounds->open() && status.members > 0 && status.has_contributions;
}

TimeNs JobShard::UnusedFor() const {
  absl::MutexLock lock(&parts_.mu);
  return parts_.rounds->membership().members().empty() ? parts_.environment.clock->Now() - attendance_.used() : 0;
}

absl::Status JobShard::ShutUnused(const absl::Status& status, std::optional<uint64_t> version, TimeNs unused_for) {
  const std::string& name = parts_.job.spec().name();
  {
    absl::MutexLock lock(&parts_.mu);
    GW_RETURN_IF_ERROR(parts_.shut);
    const auto& members = parts_.rounds->membership().members();
    if (!members.empty()) {
      return absl::FailedPreconditionError(absl::StrFormat("job '%s' has %d workers, one of them is '%s'", name,
                                                           members.size(), members.begin()->second.worker));
    }
    if (version && *version != parts_.rounds->round()) {
      return absl::FailedPreconditionError(
          absl::StrFormat("job '%s' is at version %d, not %d", name, parts_.rounds->round(), *version));
    }
    if (parts_.environment.clock->Now() - attendance_.used() < unused_for) {
      return absl::FailedPreconditionError(absl::StrFormat("job '%s' had a worker until now", name));
    }
    parts_.shut = status;  // nobody joins from here on, and nobody has a stream
  }
  stages_.Stop();
  return absl::OkStatus();
}

void JobShard::Shut(absl::Status status) {
  MemberStreams::Streams streams;
  {
    absl::MutexLock lock(&parts_.mu);
    if (!parts_.shut.ok()) return;
    parts_.shut = status;
    streams = streams_.TakeAll();
  }
  for (const auto& stream : streams) stream->Finish(status);
  stages_.Stop();
}

}  // namespace gradwire

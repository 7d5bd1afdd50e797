// One job on this server: who takes part, and the rooms that its data passes, put together.
//
//   Intake -> Flow | InitialUpload -> Rounds says "close" -> Stages (finish ... record, apply, publish) -> Desk
//
// All of it runs on the thread that brought the last chunk: nothing is handed to another thread on the way, unless the
// shards of the job agree on each round first. Where there is a journal, pullers are answered by whoever comes last:
// this thread, or the journal's once the record is safe.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/clock.h"
#include "common/base/work_pool.h"
#include "common/job/job.h"
#include "common/job/layout.h"
#include "gradwire/v1/operator.pb.h"
#include "gradwire/v1/worker.pb.h"
#include "server/desk/desk.h"
#include "server/flow/flow.h"
#include "server/flow/initial_upload.h"
#include "server/flow/intake.h"
#include "server/job/attendance.h"
#include "server/job/by_rounds.h"
#include "server/job/job_log.h"
#include "server/job/job_parts.h"
#include "server/job/member_sessions.h"
#include "server/job/member_streams.h"
#include "server/job/memory.h"
#include "server/job/parameter_digest.h"
#include "server/job/past_rounds.h"
#include "server/recovery/recovery.h"
#include "server/snapshot/snapshots.h"
#include "server/stages/stages.h"

namespace gradwire {

// Thread-safe. Owned by the registry and by the streams that are open on it.
class JobShard : public std::enable_shared_from_this<JobShard> {
 public:
  // Errors: InvalidArgument (spec, shard index); ResourceExhausted with the numbers; before anything large is made,
  // FailedPrecondition where the shard map has another digest than `layout_digest`. 0: any.
  static absl::StatusOr<std::shared_ptr<JobShard>> Make(const v1::JobSpec& spec, uint32_t shard_index,
                                                        uint32_t shard_count, const JobEnvironment& environment,
                                                        uint64_t layout_digest = 0);
  static absl::StatusOr<std::shared_ptr<JobShard>> Make(Job job, uint32_t shard_index, uint32_t shard_count,
                                                        const JobEnvironment& environment, uint64_t layout_digest = 0);
  ~JobShard();

  const Job& job() const { return parts_.job; }
  const Layout& layout() const { return parts_.layout; }
  uint32_t shard_index() const { return parts_.shard_index; }
  uint32_t bucket_count() const { return parts_.layout.bucket_count(parts_.shard_index); }
  const MemoryBound& memory() const { return parts_.memory; }
  // As in JoinReply: tells the job from one of its name that was deleted. Set before anybody joins.
  uint64_t instance() const { return instance_; }
  void SetInstance(uint64_t instance) { instance_ = instance; }
  // FailedPrecondition: a worker has joined another instance, `known`. 0: any.
  absl::Status CheckInstance(uint64_t known) const;
  // FailedPrecondition naming the first difference, unless it is this job and sharding. layout_digest 0: any.
  absl::Status CheckSame(const Job& job, uint32_t shard_index, uint32_t shard_count, uint64_t layout_digest) const;

  // The rooms.
  Intake& intake() { return intake_; }           // what workers push
  Desk& desk() { return desk_; }                 // what they pull
  JobLog& log() { return log_; }                 // where records go
  Snapshots& snapshots() { return snapshots_; }  // copies of the shard while rounds go on
  Recovery& recovery() { return recovery_; }     // before anybody joins
  ParameterDigest& digest() { return digest_; }
  Agreement* agreement() { return stages_.agreement(); }  // null: its shards have nothing to agree on

  // job_members.cc: membership; errors as in Rounds. Join: AlreadyExists where another incarnation of this name, or
  // another session of this incarnation, has a stream open, so that nobody takes a worker's place while it is there;
  // FailedPrecondition where another session took the place of this one.
  // `other_version`: as in JoinRequest. DataLoss, and the worker is no member any more: this shard is behind others.
  absl::StatusOr<v1::JoinReply> Join(const v1::WorkerIdentity& identity, uint64_t not_before, bool may_initialize,
                                     uint64_t other_version = 0);
  absl::StatusOr<v1::JoinReply> Resume(const v1::WorkerIdentity& identity, const Rounds::ResumePoint& point);
  absl::StatusOr<v1::JoinReply> CatchUp(const v1::WorkerIdentity& identity, const Rounds::ResumePoint& point,
                                        uint64_t not_before);
  absl::StatusOr<v1::HeartbeatReply> Heartbeat(const v1::HeartbeatRequest& request);
  absl::Status Leave(const v1::LeaveRequest& request);
  // Where the shards are, as a worker reaches them; jobs whose shards have nothing to agree on ignore it. Only members
  // set addresses, and only those that CheckAddresses took. Errors: InvalidArgument.
  absl::Status CheckAddresses(const std::vector<std::string>& addresses);
  void SetAddresses(MemberId member, const std::vector<std::string>& addresses);
  // A stream of a member was opened or has closed. The stream is ended when the member is lost or the job deleted.
  // ResourceExhausted: the member has too many.
  absl::StatusOr<MemberId> Attach(const v1::WorkerIdentity& identity, std::shared_ptr<Outbox> out);
  void Detach(MemberId member, const std::shared_ptr<Outbox>& out);

  // Ends leases that have run out, closes buckets that have waited long enough, and logs how many warnings were held
  // back. The parts that take long are done on `pool`, if there is one, which is gone before this job is. `slept`: so
  // long this process did not run before `now`, see Rounds::Excuse.
  void Tick(TimeNs now, WorkPool* pool = nullptr, TimeNs slept = 0);
  // When Tick has something to do, by the environment's clock. Where that becomes sooner, its tick_sooner is called.
  std::optional<TimeNs> NextTick();

  // job_status.cc. `with_digest`: with the digest of the parameters, if it can be had.
  v1::JobStatus Describe(bool with_details, bool with_digest);
  // Notes rounds from now on, see TraceRecorder::Record. ResourceExhausted: the server has no memory left for it.
  absl::Status RecordTrace(uint64_t first_round, uint64_t rounds);
  v1::TracePage ReadTrace(uint64_t from, size_t limit);
  // Bucket by bucket; adds up where nothing else runs.
  MemoryUse MeasureMemory();
  uint64_t NewestVersion() const { return parts_.NewestVersion(); }
  bool HasParameters() const;
  bool RoundInProgress() const;  // has frames that other workers of the open round still have to match
  bool Unused() const;           // nobody would miss it: no parameters, and no member that may bring them
  TimeNs UnusedFor() const;      // how long it has had no worker; 0 while it has some

  // Shuts the job. FailedPrecondition, saying which, where it has workers, is not at `version`, or had workers less
  // than `unused_for` ago.
  absl::Status ShutUnused(const absl::Status& status, std::optional<uint64_t> version, TimeNs unused_for);
  void Shut(absl::Status status);            // ends all streams with it; later calls fail with it
  void ReturnShare() { parts_.share = {}; }  // the job is about to go: its memory no longer counts

 private:
  explicit JobShard(std::unique_ptr<JobParts> parts);
  void Run(RoundActions actions);  // carries out what the rounds decided; no lock is held
  void DropMember(const Member& member);
  absl::Status InJob(const absl::Status& status) const;  // with the job's name in front of its message
  absl::StatusOr<MemberId> FindMember(const v1::WorkerIdentity& identity) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(parts_.mu);
  absl::Status CheckNameFree(const v1::WorkerIdentity& identity) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(parts_.mu);
  absl::Status CheckOneSession(const v1::WorkerIdentity& identity) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(parts_.mu);
  // Tells the journal where the last member has left, so that a server that is started again waits for nobody.
  void NoteAllLeft();
  void NoteJoined(const v1::WorkerIdentity& identity, MemberId member) ABSL_EXCLUSIVE_LOCKS_REQUIRED(parts_.mu);
  // Tells the log, and the workers that stay.
  void NoteGone(const std::vector<Member>& gone, const std::string& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(parts_.mu);
  v1::JoinReply ReplyTo(const Rounds::JoinOutcome& outcome);

  const std::unique_ptr<JobParts> owned_;
  JobParts& parts_;
  ByRounds by_rounds_;
  Desk desk_;
  Snapshots snapshots_;
  JobLog log_;
  Stages stages_;
  InitialUpload upload_;
  Intake intake_;
  Recovery recovery_;
  ParameterDigest digest_;

  uint64_t instance_ = 0;  // 0: it has none
  MemberStreams streams_ ABSL_GUARDED_BY(parts_.mu);
  MemberSessions sessions_ ABSL_GUARDED_BY(parts_.mu);
  Attendance attendance_ ABSL_GUARDED_BY(parts_.mu);
  std::optional<TimeNs> next_tick_ ABSL_GUARDED_BY(parts_.mu);  // as NextTick told
};

}  // namespace gradwire

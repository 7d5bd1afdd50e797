// One job on this server: its slice of the model, the rounds that are being merged, and who waits for what.
//
//   PushChunk -> FrameAssembler -> Accumulator ... last frame of a bucket -> Rounds says "close"
//     -> Finish -> UpdateSink (journal) -> ParameterStore -> version + 1 -> waiting pullers
//
// All of it runs on the thread that brought the last chunk: nothing is handed to another thread on the way. Where there
// is a journal, pullers are answered by whoever comes last: this thread, or the journal's once the record is safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/base/bytes.h"
#include "common/base/clock.h"
#include "common/base/work_pool.h"
#include "common/job/job.h"
#include "common/job/layout.h"
#include "common/optimizer/norm_sums.h"
#include "common/snapshot/shard_state.h"
#include "common/wire/frame.h"
#include "gradwire/v1/operator.pb.h"
#include "gradwire/v1/peer.pb.h"
#include "gradwire/v1/worker.pb.h"
#include "kernels/backend.h"
#include "server/job/bucket_state.h"
#include "server/job/copy_position.h"
#include "server/job/job_arrays.h"
#include "server/job/memory.h"
#include "server/job/memory_account.h"
#include "server/job/replay_state.h"
#include "server/job/tellers.h"
#include "server/job/update_sink.h"
#include "server/job/warning_limiter.h"
#include "server/rounds/rounds.h"
#include "server/snapshot/shard_capture.h"

namespace gradwire {

namespace journal {
class Journal;
}
struct Agreeing;
struct HeldBucket;
class NormExchange;
struct NormState;

// What a job gets from the server around it. Everything pointed to outlives the job.
struct JobEnvironment {
  kernels::Backend* backend = nullptr;
  kernels::cuda::DeviceShare* device = nullptr;  // where the backend's memory is not the host's: the jobs' share
  Clock* clock = nullptr;
  uint64_t frame_limit_bytes = 0;  // one frame, all chunks
  uint64_t job_memory_limit_bytes = 0;
  // Of this server; a promotion raises it.
  std::shared_ptr<std::atomic<uint64_t>> server_epoch = std::make_shared<std::atomic<uint64_t>>(0);
  // The id of its lineage; a standby takes that of its primary.
  std::shared_ptr<std::atomic<uint64_t>> server_lineage = std::make_shared<std::atomic<uint64_t>>(0);
  std::function<void()> tick_sooner;  // may be empty; called without a lock held
  // Null: norms get no threads; a simulator takes their turns (JobShard::PumpNorms).
  std::shared_ptr<Tellers> tellers = std::make_shared<Tellers>();
  std::shared_ptr<absl::Mutex> digest_turn = std::make_shared<absl::Mutex>();  // see JobShard::Digest
  std::shared_ptr<MemoryAccount> account;  // of all jobs; null: only the limit of each counts
  // Empty: journals and snapshots get threads of their own. A simulator, which takes their turns itself, is given every
  // journal before it starts, and returns what the job is to write to.
  std::function<std::unique_ptr<UpdateSink>(std::unique_ptr<journal::Journal>)> adopt_journal;
  // False only where a simulator proves that it notices (RoundMachine::Rules).
  bool recognize_repeats = true;
};

// What one push stream remembers between its chunks. Used by one thread at a time (sinks are serial).
struct PushStream {
  MemberId member = 0;
  uint64_t incarnation = 0;
  std::string worker;
  std::shared_ptr<Outbox> out;  // for acknowledgements that wait for the journal
  // Frames whose remaining chunks are not merged. At most one per bucket.
  struct Skipped {
    uint64_t round = 0;
    bool answered = false;      // false: its last chunk, which may ask for more, is waited for
    uint32_t digest = 0;        // of the chunks so far: judges a repeat
    bool not_included = false;  // it came too late: no repeat
  };
  std::map<uint32_t, Skipped> skipped;
};

// Thread-safe. Owned by the registry and by the streams that are open on it.
class JobShard : public std::enable_shared_from_this<JobShard> {
 public:
  // Errors: InvalidArgument (spec, shard index); ResourceExhausted with the numbers.
  static absl::StatusOr<std::shared_ptr<JobShard>> Make(const v1::JobSpec& spec, uint32_t shard_index,
                                                        uint32_t shard_count, const JobEnvironment& environment);
  static absl::StatusOr<std::shared_ptr<JobShard>> Make(Job job, uint32_t shard_index, uint32_t shard_count,
                                                        const JobEnvironment& environment);

  ~JobShard();

  // Both before anybody joins. Recover brings a new shard to where its journal ends: `read` hands the records to its
  // argument, in order. Errors: those of `read`; DataLoss (records do not follow each other); those of decoding.
  using RecordVisitor = std::function<absl::Status(journal::Record)>;
  // `snapshot`: what the journal goes on from, may be null; records of its rounds are looked at for what workers may
  // ask for again.
  absl::Status Recover(const ShardState* snapshot, const std::function<absl::Status(const RecordVisitor&)>& read);
  // The two parts of Recover. Between them the shard is a standby's: nobody joins, Follow brings it further.
  absl::Status Replay(const ShardState* snapshot, const std::function<absl::Status(const RecordVisitor&)>& read);
  absl::Status EndReplay();
  // Applies the next record of the primary, then hands it to the sink, whose `visible` is `safe`. By one thread at a
  // time, not together with EndReplay. Errors as of Recover: nothing more can follow then.
  absl::Status Follow(journal::Record record, std::function<void()> safe);
  // job_follow.cc: what a standby begins with: a record of the bucket's state and, behind it, the updates that made it,
  // as many as workers may ask for again. Waits for a round that is being applied, never for workers. What the sink is
  // given later goes on from it; of what it was given before, updates of rounds before the state are in it.
  // FailedPrecondition: the job has no parameters yet.
  absl::StatusOr<std::vector<journal::Record>> CopyBucket(uint32_t bucket);
  // Of a standby's shard, by the thread that calls Follow: how far each bucket is. Empty where that cannot be told: a
  // bucket has no update yet.
  std::vector<CopyPosition> Positions();
  // Per bucket the version that meets the job's durability here.
  std::vector<uint64_t> SafeVersions() const;
  void SetSink(std::unique_ptr<UpdateSink> sink);
  // Nothing is journaled from here on. The job was shut.
  void StopSink();

  // job_snapshot.cc: a copy of everything at the next version that all buckets pass, this one if no bucket of the open
  // round has closed; with asynchronous rounds of every bucket at a version of its own, which may be seen. Rounds go
  // on; each bucket is copied by this thread once it is there, or by the one that takes it further, who is first. One
  // at a time. Errors: DeadlineExceeded (the round did not end in time), FailedPrecondition (no parameters yet),
  // Cancelled, Aborted (buckets were already past it: try again), ResourceExhausted.
  absl::Status Capture(const std::shared_ptr<ShardCapture>& capture, absl::Duration timeout);
  // The memory for one: for Capture to fill. Takes no lock. Cancelled by BackgroundWork.
  absl::StatusOr<std::shared_ptr<ShardCapture>> NewCapture() const;
  void CancelCapture();  // this one and all later ones
  // How the last snapshot went, for the status. `version`: when it is ok.
  void NoteSnapshot(uint64_t version, const absl::Status& status);
  // A snapshot of `version` is on disk, and `oldest` is the oldest one that stays.
  void CutJournal(uint64_t version, uint64_t oldest);
  uint64_t JournalBytes() const;  // 0 without a journal
  // The journal has given records up and could be written again: only a snapshot makes the job durable.
  bool WantsSnapshot() const;
  // Why workers have seen more than would come back if the server ended now; ok where that cannot be.
  absl::Status Unsafe() const;

  const Job& job() const { return job_; }
  const Layout& layout() const { return layout_; }
  uint32_t shard_index() const { return shard_index_; }
  const MemoryBound& memory() const { return memory_; }
  // Bucket by bucket; adds up where nothing else runs.
  MemoryUse MeasureMemory();
  // FailedPrecondition naming the first difference, unless it is this very job and sharding. layout_digest 0: not
  // compared.
  absl::Status CheckSame(const Job& job, uint32_t shard_index, uint32_t shard_count, uint64_t layout_digest) const;

  // Membership; errors as in Rounds. Join: AlreadyExists where another incarnation of this name has a stream open, so
  // that nobody takes a worker's place while it is there.
  // `other_version`: as in JoinRequest. DataLoss, and the worker is no member any more: this shard is behind the
  // others.
  absl::StatusOr<v1::JoinReply> Join(const v1::WorkerIdentity& identity, uint64_t not_before, bool may_initialize,
                                     uint64_t other_version = 0);
  absl::StatusOr<v1::JoinReply> Resume(const v1::WorkerIdentity& identity, const Rounds::ResumePoint& point);
  absl::StatusOr<v1::JoinReply> CatchUp(const v1::WorkerIdentity& identity, const Rounds::ResumePoint& point,
                                        uint64_t not_before);
  absl::StatusOr<v1::HeartbeatReply> Heartbeat(const v1::HeartbeatRequest& request);
  absl::Status Leave(const v1::LeaveRequest& request);
  // job_norms.cc, of jobs whose updates need the norms of whole tensors; others ignore them. Where the shards are, as a
  // worker reaches them. Errors: InvalidArgument.
  absl::Status CheckAddresses(const std::vector<std::string>& addresses) const;
  // What counts is said by members; CheckAddresses was ok for it.
  void SetAddresses(MemberId member, const std::vector<std::string>& addresses);
  // Another shard tells its squares. Errors: those of NormExchange::Take.
  absl::StatusOr<v1::ExchangeReply> ExchangeNorms(const v1::ExchangeRequest& request);
  // Without tellers: whether PumpNorms has something to do, which then goes as far as what the shards have told each
  // other allows, and whom to tell (null: no update needs norms). By one thread.
  bool NormsHaveWork() const;
  void PumpNorms();
  NormExchange* norm_exchange();
  // Ends leases that have run out, closes what has waited long enough; writes how many warnings were held back. What
  // takes long of it is done on `pool`, if there is one, which is gone before this is.
  void Tick(WorkPool* pool = nullptr);
  // When Tick has something to do, on the clock of the environment. Where that becomes sooner than this told last,
  // JobEnvironment::tick_sooner is called.
  std::optional<TimeNs> NextTick();

  // Streams that a member may have open: one for pushes, one for pulls, and those that broke and have not ended yet.
  static constexpr size_t kMaxStreamsPerMember = 16;
  static constexpr size_t kMaxDepartedStreams = 64;
  // A stream of a member was opened or has closed. The stream is ended when the member is lost or the job deleted.
  // ResourceExhausted: the member has too many.
  absl::StatusOr<MemberId> Attach(const v1::WorkerIdentity& identity, std::shared_ptr<Outbox> out);
  void Detach(MemberId member, const std::shared_ptr<Outbox>& out);
  // Takes back what a closed push stream left unfinished.
  void AbandonStream(const PushStream& stream);

  // Merges one chunk, which may have arrived in several slices. The acknowledgement comes with the last chunk of a
  // frame, a refusal with the one that is at fault; that of journaled initial parameters through `stream.out`, once
  // they are as durable as the job asks. An error (bytes that cannot be attributed to any frame) ends the stream.
  absl::StatusOr<std::optional<v1::PushAck>> PushChunk(PushStream& stream, std::span<const Bytes> received);
  // Sends the acknowledgement of a frame through `out`, and answers `pull` for the version that its round makes, now or
  // when that exists; in one message where both are due at once. An error ends the stream.
  absl::Status Acknowledge(MemberId member, const v1::PushAck& ack, std::span<const v1::PullKind> pull,
                           const std::shared_ptr<Outbox>& out);
  // Answers every bucket of the request through `out`, now or when the version exists.
  absl::Status Pull(MemberId member, const v1::PullRequest& request, const std::shared_ptr<Outbox>& out);

  // `digest`: with that of Digest, if it can be had.
  v1::JobStatus Describe(bool with_details, bool digest);
  // job_digest.cc: the SHA-256 of the parameters, in hex, empty where there are none; of some time between the call and
  // its return. Computed once for all who wait for it, and not again while nothing changes, in a bounded share of one
  // core's time for all jobs of the server. ResourceExhausted: too many wait already. Cancelled or what Shut said.
  absl::StatusOr<std::string> Digest();
  // What it takes counts no longer against the server's memory: it is about to go.
  void ReturnShare() { share_ = {}; }
  bool HasParameters() const;
  // Nothing is here that anybody would miss: no parameters, and no member that may bring them.
  bool Unused() const;
  // How long it has had no worker; 0 while it has some.
  TimeNs UnusedFor() const;
  // Shuts it unless it has workers, or is not at `version`, or had workers less than `unused_for` ago:
  // FailedPrecondition saying which.
  absl::Status ShutUnused(const absl::Status& status, std::optional<uint64_t> version, TimeNs unused_for);
  // True while the open round has frames that other workers of it still have to match.
  bool RoundInProgress() const;
  // Ends all streams with `status`; later calls fail with it.
  void Shut(absl::Status status);

  uint64_t NewestVersion();  // of any bucket

 private:
  struct WorkerTotals {
    uint64_t frames = 0;
    uint64_t bytes = 0;
    uint64_t sanitized_elements = 0;
    std::shared_ptr<UnsentBudget> unsent;  // of all its streams; null until the first
    absl::Status other_rates;              // its frame was merged before others showed that its schedule is another one
  };

  JobShard(Job job, Layout layout, uint32_t shard_index, const JobEnvironment& environment);
  absl::Status Prepare();
  // ResourceExhausted: `bytes` do not fit beside the other jobs of this server.
  static absl::Status Reserve(const Job& job, const JobEnvironment& environment, uint64_t bytes,
                              MemoryAccount::Share* share);
  absl::Status Allocate(BucketState& bucket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  absl::Status CheckNotBehind(uint64_t other_version) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<MemberId> FindMember(const v1::WorkerIdentity& identity) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckNameFree(const v1::WorkerIdentity& identity) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // To the log, and to the workers that stay.
  void NoteGone(const std::vector<Member>& gone, const std::string& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  v1::JoinReply ReplyTo(const Rounds::JoinOutcome& outcome);
  // Totals that a worker told; they only grow.
  void NoteSanitized(MemberId member, uint64_t elements) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // job_close.cc: carrying out what the state machine decided. No locks held.
  void Run(const RoundActions& actions);
  void DropMember(const Member& member);
  // Notes a stream that may outlive its member; returns those that are now to be cancelled.
  std::vector<std::shared_ptr<Outbox>> NoteDeparted(const std::vector<std::shared_ptr<Outbox>>& streams)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CloseBucket(const RoundActions::Close& close);
  // A finished update, or why there is none, to the sink, the optimizer and the pullers.
  void PublishClosed(const RoundActions::Close& close, const UpdateFrame& update,
                     std::vector<journal::Contribution> who, absl::Status status = absl::OkStatus());
  // Hands an update frame to the sink.
  absl::Status Write(const RoundActions::Close& close, const UpdateFrame& update,
                     const std::vector<journal::Contribution>& who);
  std::vector<journal::Contribution> WhoTookPart(const RoundActions::Close& close) const;
  // The record that makes `version` of a bucket may be seen.
  void NoteWritten(uint32_t bucket, uint64_t version);
  void DescribeDurability(uint64_t version, v1::JobStatus* job);
  void DescribeTraffic(const BucketState& bucket, v1::BucketTraffic* out) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  absl::Status FinishRound(BucketState& bucket, const RoundActions::Close& close, UpdateFrame* update);
  // Of the update that the bucket's next version is made by.
  FrameIdentity IdentityOf(const BucketState& bucket, const OpenRound& open) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  // `plan`: by which the update is encoded, one of the bucket's.
  absl::Status Publish(BucketState& bucket, const UpdateFrame& update, const RoundPlan& plan,
                       std::vector<journal::Contribution> who) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  uint64_t PlanVersionOf(const RoundActions::Close& close) const;
  // Keeps the update that made `version`, the newest one.
  void Retain(BucketState& bucket, uint64_t version, RetainedUpdate update) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  void LimitOwed(BucketState& bucket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  // What workers that are away may ask about rounds before `round`, as records (kKept), the oldest first.
  std::vector<journal::Record> KeptBefore(BucketState& bucket, uint64_t round) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  // True once where NextTick is sooner than it was told.
  bool TickIsSooner() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Writes the first refusal of each kind to the log; Tick counts the others.
  void WarnRefused(absl::StatusCode kind, const std::string& message);
  // Opens the rounds whose plan came with the bucket's version.
  void OpenNextRounds(BucketState& bucket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  void AbandonPartial(BucketState& bucket, OpenRound& open, MemberId member) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);

  // job_push.cc
  using Ack = std::optional<v1::PushAck>;
  absl::Status CheckHeader(const PushStream& stream, const wire::FrameHeader& header) const;
  Ack PushFrame(PushStream& stream, const wire::Chunk& chunk, std::span<const Bytes> received);
  Ack PushSkipped(PushStream& stream, const wire::Chunk& chunk, PushStream::Skipped skipped);
  Ack PushAbstain(PushStream& stream, const wire::FrameHeader& header);
  Ack PushInitialize(PushStream& stream, const wire::Chunk& chunk, std::span<const Bytes> received);

  // job_replace.cc
  absl::Status CheckReplacement(const wire::FrameHeader& header) const;
  // A round has either gradients or parameters that replace the job's; `replaces`: which one comes.
  static absl::Status CheckUnmixed(const OpenRound& open, bool replaces);
  Ack PushReplacement(PushStream& stream, const wire::Chunk& chunk, std::span<const Bytes> received);
  // Keeps the chunk; with the last one the worker has abstained, and the round is one that replaces.
  absl::StatusOr<PushVerdict> HoldReplacement(BucketState& bucket, OpenRound& open, const PushStream& stream,
                                              const wire::FrameHeader& header, std::span<const Bytes> received,
                                              RoundActions* actions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  // Decodes a whole frame. *first: its values, where it is the first of the round; else they are the same.
  absl::Status TakeReplacement(const BucketState& bucket, const OpenRound& open, const PushStream& stream,
                               uint64_t round, std::span<const Bytes> chunks, std::optional<Replacement>* first) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  UpdateFrame FinishReplacement(BucketState& bucket, const RoundPlan& plan, const OpenRound& open) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);

  // job_push.cc
  // The worker sent initial parameters again that are here.
  Ack RepeatInitialize(PushStream& stream, const wire::FrameHeader& header, uint32_t digest);
  absl::Status StillFinishing(const BucketState& bucket, uint64_t round) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  // `open`: the round of the frame; null: it is not open here.
  absl::StatusOr<PushVerdict> Begin(BucketState& bucket, OpenRound* open, PushStream& stream,
                                    const wire::FrameHeader& header) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  absl::StatusOr<PushVerdict> Merge(BucketState& bucket, OpenRound& open, PushStream& stream, const wire::Chunk& chunk,
                                    std::span<const Bytes> received, RoundActions* actions, bool* complete)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  absl::Status CheckInFlight(uint64_t chunk_bytes) const;
  // Whether the round takes the learning rates of this frame in the place of those that it has. InvalidArgument: they are
  // not those of a member that has been here for longer.
  absl::StatusOr<bool> FixLearningRates(const OpenRound& open, MemberId member, const FrameAssembler& frame)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  static absl::Status OtherRates(std::span<const float> rates, std::span<const float> others, const std::string& of);
  Ack Refuse(PushStream& stream, const wire::FrameHeader& header, const absl::Status& why);
  // `made`: as in PushAck.
  Ack Acknowledge(PushStream& stream, const wire::FrameHeader& header, PushVerdict verdict, uint64_t made = 0);
  // Where unfinished frames of `round` are kept; null: nowhere.
  OpenRound* PlaceOf(BucketState& bucket, uint64_t round) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  // job_async.cc: takes the place of Merge. Keeps the chunk; with the last one the frame is merged, once the frame
  // before it has made its version. *complete: it is decided on.
  absl::StatusOr<PushVerdict> Hold(BucketState& bucket, PushStream& stream, const wire::Chunk& chunk,
                                   std::span<const Bytes> received, RoundActions* actions, bool* complete)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  absl::StatusOr<PushVerdict> MergeHeld(BucketState& bucket, const PushStream& stream,
                                        const std::vector<std::vector<Bytes>>& held, const wire::Chunk& last,
                                        RoundActions* actions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  // A record of a bucket's initial parameters may be seen: they are acknowledged; with the last one version 0 is there.
  void NoteInitialWritten(uint32_t bucket);

  // job_norms.cc
  void ForgetAddresses(MemberId member);
  absl::Status PrepareNorms();
  void StopNorms();
  // The journal was replayed; `round`: the oldest that is not closed.
  void RestoreNorms(uint64_t round);
  // A bucket has closed; its update waits for the others of the round.
  void HoldClosed(const RoundActions::Close& close);
  void Hold(const RoundActions::Close& close);
  // The thread that pumps.
  void NormLoop();
  // There is a round to agree on: the one that is, or the next, all of whose buckets are held.
  bool TakeHeld();
  // Phase by phase. False: other shards have not told theirs.
  absl::StatusOr<bool> Agree(Agreeing* agreeing);
  // What this shard has of the phase.
  absl::StatusOr<ShardSquares> SquaresOf(Agreeing* agreeing);
  // What the shards agreed on in the phase goes into the held updates; `sums`: [tensor][norm of the phase].
  void SetNorms(const std::vector<double>& sums, Agreeing* agreeing);
  // Writes and applies what was held.
  absl::Status CloseHeld(Agreeing* agreeing);
  // Another update takes the place of the held one.
  absl::Status Skip(HeldBucket* held);
  void FailBuckets(uint64_t round, const absl::Status& why);
  // The retained update that `round` made; null: it is not there.
  const RetainedUpdate* UpdateOf(const BucketState& bucket, uint64_t round) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  // Whether the round is skipped, by what was written of it or else by what is held.
  v1::RoundFate FateOf(uint64_t round, const std::vector<HeldBucket>& held);
  // The squares of tensors over all shards that retained updates of `round` tell.
  std::map<uint32_t, std::vector<double>> TotalsOf(uint64_t round, size_t phase);
  // All that this shard has of a round that it wrote. Nothing: it is not retained any more.
  std::optional<ShardSquares> WrittenSquares(uint64_t round, size_t phase);

  // job_snapshot.cc
  static bool CanBeCaptured(const BucketState& bucket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  static void NoteForCapture(BucketState& bucket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  static void NoteWrittenForCapture(BucketState& bucket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  void CaptureBucket(BucketState& bucket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);

  // job_recovery.cc
  void LoadSnapshot(const ShardState& snapshot);
  absl::Status ReplayRecord(const journal::Record& record);
  absl::Status ReplayInitial(const journal::Record& record);
  absl::Status ReplayUpdate(const journal::Record& record);
  absl::Status ReplayKept(const journal::Record& record);
  absl::Status ReplayWhole(const journal::Record& record);

  // job_digest.cc
  absl::StatusOr<std::string> ComputeDigest(std::vector<uint64_t>* versions);
  std::vector<uint64_t> ParameterVersions() ABSL_EXCLUSIVE_LOCKS_REQUIRED(digest_mu_);

  // job_pull.cc
  // Keeps the waiter if its version does not exist yet. `given_up`: the refusal of an older one, of another stream of
  // this member, that gave way.
  std::optional<Delivery> AnswerOrWait(uint32_t bucket, Waiter waiter, std::vector<Delivery>* given_up);
  std::optional<Delivery> Answer(BucketState& bucket, const Waiter& waiter) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  // Of a waiter whose version is there and may not be seen yet.
  void PrepareAnswer(BucketState& bucket, Waiter* waiter) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  SharedChunks Serialize(BucketState& bucket, v1::PullKind kind) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  std::vector<Delivery> TakeReady(BucketState& bucket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  void Deliver(std::vector<Delivery> deliveries);
  // ResourceExhausted, and nothing was sent: the worker reads too little of what it asked for.
  absl::Status Send(const Delivery& delivery);

  const Job job_;
  const Layout layout_;
  const uint32_t shard_index_;
  const JobEnvironment environment_;
  MemoryAccount::Share share_;                         // of who makes the job and takes it out; goes after the arrays
  MemoryBound memory_;                                 // constant after Make
  uint64_t unsent_limit_bytes_ = 0;                    // the same: of one member's answers
  std::unique_ptr<JobArrays> arrays_;                  // the same
  std::vector<std::unique_ptr<BucketState>> buckets_;  // constant after Make; each synchronises itself

  WarningLimiter refusals_;
  std::atomic<uint64_t> in_flight_bytes_{0};
  std::atomic<uint64_t> push_bytes_{0};
  std::atomic<uint64_t> pull_bytes_{0};
  std::atomic<uint64_t> initialize_bytes_{0};
  std::atomic<uint64_t> parameter_bytes_{0};
  std::atomic<uint64_t> deferred_elements_{0};
  std::atomic<uint64_t> update_elements_{0};
  std::atomic<uint64_t> refused_frames_{0};
  std::atomic<uint64_t> not_included_frames_{0};

  mutable absl::Mutex mu_;
  const std::unique_ptr<Rounds> rounds_;
  Rounds& machine_ ABSL_GUARDED_BY(mu_);                  // *rounds_
  std::optional<TimeNs> next_tick_ ABSL_GUARDED_BY(mu_);  // as NextTick told
  absl::Status shut_ ABSL_GUARDED_BY(mu_);
  int unwritten_initials_ ABSL_GUARDED_BY(mu_) = 0;       // initial parameters whose records may not be seen yet
  uint64_t sanitized_elements_ ABSL_GUARDED_BY(mu_) = 0;  // of all workers so far
  std::multimap<MemberId, std::shared_ptr<Outbox>> streams_ ABSL_GUARDED_BY(mu_);  // at most kMaxStreamsPerMember each
  // Of workers that are no members any more: they may still be reading. At most kMaxDepartedStreams, the oldest first.
  std::deque<std::weak_ptr<Outbox>> departed_ ABSL_GUARDED_BY(mu_);
  std::map<MemberId, WorkerTotals> totals_ ABSL_GUARDED_BY(mu_);  // of members only
  uint64_t gone_ ABSL_GUARDED_BY(mu_) = 0;      // members so far
  std::string last_gone_ ABSL_GUARDED_BY(mu_);  // and why
  const TimeNs made_;
  TimeNs used_ ABSL_GUARDED_BY(mu_);  // a worker joined, or the last one went

  // Of the parameters, as far as anybody asked for it.
  absl::Mutex digest_mu_;  // before the others
  uint64_t digests_asked_ ABSL_GUARDED_BY(digest_mu_) = 0;
  uint64_t digest_of_ ABSL_GUARDED_BY(digest_mu_) = 0;  // those who had asked when it was begun
  bool digesting_ ABSL_GUARDED_BY(digest_mu_) = false;
  size_t digest_waiters_ ABSL_GUARDED_BY(digest_mu_) = 0;
  std::vector<uint64_t> digest_versions_ ABSL_GUARDED_BY(digest_mu_);  // by bucket
  absl::StatusOr<std::string> digest_ ABSL_GUARDED_BY(digest_mu_) = "";

  std::unique_ptr<NormState> norms_;  // constant after Make; null: no update needs norms

  absl::Mutex snapshot_mu_;  // innermost
  std::shared_ptr<ShardCapture> capture_ ABSL_GUARDED_BY(snapshot_mu_);
  bool no_capture_ ABSL_GUARDED_BY(snapshot_mu_) = false;
  uint64_t snapshots_ ABSL_GUARDED_BY(snapshot_mu_) = 0;  // tried
  uint64_t snapshot_version_ ABSL_GUARDED_BY(snapshot_mu_) = 0;
  absl::Status snapshot_status_ ABSL_GUARDED_BY(snapshot_mu_);

  std::unique_ptr<ReplayState> replay_;  // of the thread that replays
  std::atomic<bool> replaying_{false};   // since Replay, until EndReplay
  uint64_t recovered_version_ = 0;       // constant once anybody joins, as sink_
  std::unique_ptr<UpdateSink> sink_;     // may be null: nothing is journaled
};

}  // namespace gradwire

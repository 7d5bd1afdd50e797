// Making a job, membership, and carrying out what the round machine decided; see job_shard.h.
#include "server/job/job_shard.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/failpoint.h"
#include "common/base/out_of_memory.h"
#include "common/base/sha256.h"
#include "common/base/status_macros.h"
#include "common/transport/sink_scope.h"
#include "server/job/spec_difference.h"

namespace gradwire {
namespace {

constexpr TimeNs kNsPerMs = 1'000'000;
constexpr std::string_view kDeviceFlag = "--device-memory-limit-bytes";

ArraysLimit LimitOfArrays(const JobEnvironment& environment) {
  if (environment.device != nullptr) return {environment.device->memory_limit_bytes(), kDeviceFlag};
  return {environment.job_memory_limit_bytes, "--job-memory-limit-bytes"};
}

RoundMachine::Rules RulesOf(const Job& job, const Layout& layout, const JobEnvironment& environment) {
  RoundMachine::Rules rules;
  rules.buckets = layout.bucket_count();
  rules.min_workers = job.spec().min_workers();
  rules.needs_initialization = job.keeps_parameters();
  rules.recognize_repeats = environment.recognize_repeats;
  rules.membership.max_workers = job.spec().max_workers();
  rules.membership.lease_ns = job.spec().lease_ms() * kNsPerMs;
  rules.quorum = job.spec().rounds().quorum();
  rules.deviations = job.spec().rounds().deviations();
  return rules;
}

}  // namespace

JobShard::JobShard(Job job, Layout layout, uint32_t shard_index, const JobEnvironment& environment)
    : job_(std::move(job)),
      layout_(std::move(layout)),
      shard_index_(shard_index),
      environment_(environment),
      machine_(RulesOf(job_, layout_, environment)) {}

JobShard::~JobShard() { StopSink(); }

void JobShard::SetSink(std::unique_ptr<UpdateSink> sink) {
  sink_ = std::move(sink);
  for (const auto& bucket : buckets_) {
    absl::MutexLock lock(&bucket->mu);
    bucket->durable = bucket->version;
  }
}

void JobShard::StopSink() {
  if (sink_ != nullptr) sink_->Stop();
}

absl::StatusOr<std::shared_ptr<JobShard>> JobShard::Make(const v1::JobSpec& spec, uint32_t shard_index,
                                                         uint32_t shard_count, const JobEnvironment& environment) {
  GW_ASSIGN_OR_RETURN(Job job, Job::Make(spec));
  if (shard_index >= shard_count) {
    return absl::InvalidArgumentError(absl::StrFormat("job '%s': shard index %d is not below the shard count %d",
                                                      job.spec().name(), shard_index, shard_count));
  }
  // Before the shard map: a spec of a few bytes can ask for one of any size.
  const ArraysLimit limit = LimitOfArrays(environment);
  GW_RETURN_IF_ERROR(CheckMemoryBeforeLayout(job, shard_index, shard_count, limit, environment.job_memory_limit_bytes));
  GW_ASSIGN_OR_RETURN(Layout layout, Layout::Make(job, shard_count));
  // Before anything large is allocated or any codec prepared.
  const MemoryBound least =
      BoundMemory(job, layout, shard_index, {}, environment.frame_limit_bytes, environment.device != nullptr);
  if (const uint64_t bytes = least.parameters + least.moments + least.device; bytes > limit.bytes) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "job '%s': parameters and moments of shard %d of %d take %d bytes; the limit per job is %d: use "
        "more shards or raise %s",
        job.spec().name(), shard_index, shard_count, bytes, limit.bytes, std::string(limit.flag)));
  }
  std::shared_ptr<JobShard> shard(new JobShard(std::move(job), std::move(layout), shard_index, environment));
  GW_RETURN_IF_ERROR(shard->Prepare());
  return shard;
}

absl::Status JobShard::Prepare() {
  std::vector<std::unique_ptr<Codec>> codecs;
  for (uint32_t b = 0; b < layout_.bucket_count(); ++b) {
    GW_ASSIGN_OR_RETURN(std::unique_ptr<Codec> codec,
                        MakeCodec({&job_, &layout_.at(b, shard_index_), environment_.backend}));
    codecs.push_back(std::move(codec));
  }
  kernels::cuda::DeviceShare* device = environment_.device;
  memory_ = BoundMemory(job_, layout_, shard_index_, codecs, environment_.frame_limit_bytes, device != nullptr);
  if (memory_.total() > environment_.job_memory_limit_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("job '%s': shard %d of %d may take %s; the limit per job is %d: use more shards or raise "
                        "--job-memory-limit-bytes",
                        job_.spec().name(), shard_index_, layout_.shard_count(), memory_.ToString(),
                        environment_.job_memory_limit_bytes));
  }
  if (device == nullptr) {
    arrays_ = MakeHostArrays(&job_, &layout_, shard_index_, environment_.backend);
  } else {
    auto made = MakeDeviceArrays(&job_, &layout_, shard_index_, codecs, device, memory_.device);
    if (!made.ok()) {
      return absl::Status(made.status().code(),
                          absl::StrFormat("job '%s': shard %d of %d: %s: use more shards, delete a job or raise %s",
                                          job_.spec().name(), shard_index_, layout_.shard_count(),
                                          std::string(made.status().message()), std::string(kDeviceFlag)));
    }
    arrays_ = *std::move(made);
  }
  for (uint32_t b = 0; b < layout_.bucket_count(); ++b) {
    auto bucket = std::make_unique<BucketState>();
    bucket->layout = &layout_.at(b, shard_index_);
    bucket->codec = std::move(codecs[b]);
    {
      absl::MutexLock lock(&bucket->mu);
      GW_RETURN_IF_ERROR(Allocate(*bucket));
    }
    buckets_.push_back(std::move(bucket));
  }
  return absl::OkStatus();
}

absl::Status JobShard::Allocate(BucketState& bucket) {
  const uint32_t b = bucket.layout->bucket;
  GW_ASSIGN_OR_RETURN(bucket.store, arrays_->NewStore(b));
  GW_ASSIGN_OR_RETURN(bucket.accumulator, arrays_->NewAccumulator(b, *bucket.codec));
  bucket.ready = !job_.keeps_parameters();
  bucket.plan = bucket.codec->InitialPlan();
  bucket.accumulator->Open(0, bucket.plan);
  return absl::OkStatus();
}

absl::Status JobShard::CheckSame(const Job& job, uint32_t shard_index, uint32_t shard_count,
                                 uint64_t layout_digest) const {
  const std::string& name = job_.spec().name();
  if (shard_count != layout_.shard_count() || shard_index != shard_index_) {
    return absl::FailedPreconditionError(
        absl::StrFormat("job '%s': this server is shard %d of %d, asked for as shard %d of %d: list the servers in the "
                        "same order everywhere",
                        name, shard_index_, layout_.shard_count(), shard_index, shard_count));
  }
  if (job.digest() != job_.digest()) {
    return absl::FailedPreconditionError(
        absl::StrFormat("job '%s' exists here with another spec: %s. Use another name, or delete the job first", name,
                        DescribeDifference(job_.spec(), job.spec())));
  }
  if (layout_digest != 0 && layout_digest != layout_.digest()) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "job '%s': the worker's shard map has digest %016x, this server's %016x, from equal specs: worker "
        "and server run different versions of Gradwire",
        name, layout_digest, layout_.digest()));
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::JoinReply> JobShard::Join(const v1::WorkerIdentity& identity, uint64_t not_before,
                                             bool may_initialize) {
  RoundActions actions;
  absl::StatusOr<RoundMachine::JoinOutcome> outcome;
  {
    absl::MutexLock lock(&mu_);
    GW_RETURN_IF_ERROR(shut_);
    outcome = machine_.Join(identity.worker(), identity.incarnation(), not_before, may_initialize,
                            environment_.clock->Now(), &actions);
    if (outcome.ok()) totals_[outcome->id];
  }
  Run(actions);
  GW_RETURN_IF_ERROR(outcome.status());
  spdlog::info("job {} worker {} joined, incarnation {:016x}, starts at round {}{}", identity.job(), identity.worker(),
               identity.incarnation(), outcome->start_version, outcome->must_initialize ? ", initializes" : "");
  return ReplyTo(*outcome);
}

absl::StatusOr<v1::JoinReply> JobShard::Resume(const v1::WorkerIdentity& identity,
                                               const RoundMachine::ResumePoint& point) {
  RoundActions actions;
  absl::StatusOr<RoundMachine::JoinOutcome> outcome;
  {
    absl::MutexLock lock(&mu_);
    GW_RETURN_IF_ERROR(shut_);
    outcome = machine_.Resume(identity.worker(), identity.incarnation(), point, environment_.clock->Now(), &actions);
    if (outcome.ok()) totals_[outcome->id];
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

absl::StatusOr<v1::JoinReply> JobShard::CatchUp(const v1::WorkerIdentity& identity, uint64_t not_before) {
  RoundActions actions;
  absl::StatusOr<RoundMachine::JoinOutcome> outcome;
  {
    absl::MutexLock lock(&mu_);
    GW_RETURN_IF_ERROR(shut_);
    outcome =
        machine_.CatchUp(identity.worker(), identity.incarnation(), not_before, environment_.clock->Now(), &actions);
    if (outcome.ok()) totals_[outcome->id];
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

v1::JoinReply JobShard::ReplyTo(const RoundMachine::JoinOutcome& outcome) const {
  v1::JoinReply reply;
  reply.set_start_version(outcome.start_version);
  reply.set_must_initialize(outcome.must_initialize);
  reply.set_waiting_for_workers(outcome.waiting_for_workers);
  reply.set_lease_ms(job_.spec().lease_ms());
  reply.set_server_epoch(*environment_.server_epoch);
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
  return reply;
}

absl::Status JobShard::Leave(const v1::LeaveRequest& request) {
  RoundActions actions;
  {
    absl::MutexLock lock(&mu_);
    GW_ASSIGN_OR_RETURN(const MemberId member, FindMember(request.identity()));
    NoteSanitized(member, request.sanitized_elements());
    machine_.Leave(member, environment_.clock->Now(), &actions);
    // The worker closes its streams itself: what it has sent is still answered.
    streams_.erase(member);
  }
  Run(actions);
  return absl::OkStatus();
}

void JobShard::Tick() {
  RoundActions actions;
  const TimeNs now = environment_.clock->Now();
  {
    absl::MutexLock lock(&mu_);
    machine_.Tick(now, &actions);
  }
  for (const WarningLimiter::Count& more : refusals_.TakeEnded(now)) {
    spdlog::warn("job {}: {} more frames refused with {} within 10 s", job_.spec().name(), more.warnings,
                 absl::StatusCodeToString(more.kind));
  }
  for (const Member& member : actions.lost) {
    spdlog::warn("job {} worker {}: no sign of life for {} ms, no longer waited for", job_.spec().name(), member.worker,
                 job_.spec().lease_ms());
  }
  Run(actions);
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

void JobShard::AbandonStream(const PushStream& stream) {
  for (const auto& bucket : buckets_) {
    absl::MutexLock lock(&bucket->mu);
    const auto it = bucket->partial.find(stream.member);
    if (it != bucket->partial.end() && it->second.stream == &stream) AbandonPartial(*bucket, stream.member);
    if (bucket->initializing_stream == &stream) {
      in_flight_bytes_ -= TotalSize(bucket->initial_chunks);
      bucket->initial_chunks.clear();
      bucket->initializing_stream = nullptr;
    }
  }
}

void JobShard::AbandonPartial(BucketState& bucket, MemberId member) {
  const auto it = bucket.partial.find(member);
  if (it == bucket.partial.end()) return;
  in_flight_bytes_ -= it->second.held_bytes;
  it->second.assembler->Abandon();
  if (it->second.assembler->spoiled() && bucket.failure.ok()) {
    bucket.failure = absl::Status(absl::StatusCode::kResourceExhausted, "out of memory while taking back a frame");
  }
  bucket.partial.erase(it);
}

void JobShard::Run(const RoundActions& actions) {
  for (const Member& member : actions.lost) DropMember(member);
  for (const RoundActions::Close& close : actions.close) {
    // Every bucket of the round is closed, whatever happens to the others.
    const absl::Status closed = CatchBadAlloc("closing a bucket", [&] {
      CloseBucket(close);
      return absl::OkStatus();
    });
    if (closed.ok()) continue;
    absl::MutexLock lock(&buckets_[close.bucket]->mu);
    if (buckets_[close.bucket]->failure.ok()) buckets_[close.bucket]->failure = closed;
  }
  if (actions.opened && *actions.opened == 0) spdlog::info("job {}: round 0 opens", job_.spec().name());
  if (job_.spec().rounds().quorum() == 0 || !environment_.tick_sooner) return;
  bool sooner = false;
  {
    absl::MutexLock lock(&mu_);
    sooner = TickIsSooner();
  }
  if (sooner) environment_.tick_sooner();
}

void JobShard::DropMember(const Member& member) {
  for (const auto& bucket : buckets_) {
    absl::MutexLock lock(&bucket->mu);
    AbandonPartial(*bucket, member.id);
  }
  std::vector<std::shared_ptr<Outbox>> streams;
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
  }
  for (const auto& stream : streams) stream->Finish(why);
}

void JobShard::CloseBucket(const RoundActions::Close& close) {
  BucketState& bucket = *buckets_[close.bucket];
  UpdateFrame update;
  GW_FAILPOINT("round.before_close");
  // The round is closed whatever happens: where memory runs out, the bucket stops and its pullers are told.
  absl::Status status = CatchBadAlloc("merging", [&] { return FinishRound(bucket, close, &update); });
  GW_FAILPOINT("round.before_journal");
  // The disk works on it while this thread applies it.
  std::vector<journal::Contribution> who;
  if (status.ok() && sink_ != nullptr) {
    status = CatchBadAlloc("the journal", [&] {
      who = WhoTookPart(close);
      return Write(close, update, who);
    });
  }
  std::vector<Delivery> ready;
  {
    absl::MutexLock lock(&bucket.mu);
    if (status.ok()) {
      status = CatchBadAlloc("the optimizer", [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) {
        return Publish(bucket, update, std::move(who));
      });
    }
    if (!status.ok() && bucket.failure.ok()) {
      bucket.failure =
          absl::Status(status.code(), absl::StrFormat("job '%s' round %d bucket %d stopped: %s", job_.spec().name(),
                                                      close.round, close.bucket, std::string(status.message())));
    }
    ready = TakeReady(bucket);
  }
  if (!status.ok())
    spdlog::error("job {} round {} bucket {}: {}", job_.spec().name(), close.round, close.bucket, status.ToString());
  Deliver(ready);
}

std::vector<journal::Contribution> JobShard::WhoTookPart(const RoundActions::Close& close) const {
  std::vector<journal::Contribution> who;
  absl::MutexLock lock(&mu_);
  for (const auto& [id, contribution] : close.contributions) {
    const Member* member = machine_.membership().Get(id);
    who.push_back({id, member == nullptr ? "" : member->worker, member == nullptr ? 0 : member->incarnation,
                   contribution.digest, contribution.included});
  }
  return who;
}

absl::Status JobShard::Write(const RoundActions::Close& close, const UpdateFrame& update,
                             const std::vector<journal::Contribution>& who) {
  sink_->Append({journal::RecordType::kUpdate, close.bucket, close.round, who, update.chunks},
                [this, bucket = close.bucket, version = close.round + 1] { NoteWritten(bucket, version); });
  return absl::OkStatus();
}

void JobShard::NoteWritten(uint32_t index, uint64_t version) {
  // On the journal's thread, which slow pullers must not hold up: inside a sink sends never block.
  const transport::SinkScope never_block(this);
  GW_FAILPOINT("version.before_visible");
  BucketState& bucket = *buckets_[index];
  std::vector<Delivery> ready;
  {
    absl::MutexLock lock(&bucket.mu);
    bucket.durable = std::max(bucket.durable, version);
    ready = TakeReady(bucket);
  }
  GW_FAILPOINT("version.after_visible");
  Deliver(ready);
}

absl::Status JobShard::FinishRound(BucketState& bucket, const RoundActions::Close& close, UpdateFrame* update) {
  absl::MutexLock lock(&bucket.mu);
  // Another thread may still be finishing the round before (only where a round closed without frames).
  auto reached = [&bucket, &close]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) {
    return bucket.version >= close.round || !bucket.failure.ok();
  };
  bucket.mu.Await(absl::Condition(&reached));
  GW_RETURN_IF_ERROR(bucket.failure);
  while (!bucket.partial.empty()) AbandonPartial(bucket, bucket.partial.begin()->first);
  GW_RETURN_IF_ERROR(bucket.failure);  // one of them may have spoiled the accumulator
  if (bucket.committed != close.contributors || bucket.version != close.round) {
    return absl::InternalError(absl::StrFormat("round %d closes with %d frames, but %d are merged into round %d",
                                               close.round, close.contributors, bucket.committed, bucket.version));
  }
  if (bucket.learning_rates.empty()) bucket.learning_rates.resize(job_.spec().optimizer().groups_size());
  FrameIdentity id;
  id.shard = static_cast<uint16_t>(shard_index_);
  id.bucket = close.bucket;
  id.round = close.round;
  id.learning_rates = bucket.learning_rates;
  GW_ASSIGN_OR_RETURN(*update, bucket.accumulator->Finish(id, close.contributors));
  return absl::OkStatus();
}

absl::Status JobShard::Publish(BucketState& bucket, const UpdateFrame& update, std::vector<journal::Contribution> who) {
  GW_RETURN_IF_ERROR(bucket.store->Apply(update, bucket.plan));
  deferred_elements_ += update.stats.deferred;
  update_elements_ += update.stats.elements;
  ++bucket.version;
  bucket.plan = update.next;
  bucket.committed = 0;
  bucket.learning_rates.clear();
  if (!replaying_) bucket.accumulator->Open(bucket.version, bucket.plan);  // else EndReplay does, once
  Retain(bucket,
         {std::make_shared<const std::vector<Bytes>>(update.chunks), update.stats.deferred > 0, std::move(who)});
  bucket.serialized = nullptr;
  CaptureBucket(bucket);
  return absl::OkStatus();
}

void JobShard::Retain(BucketState& bucket, RetainedUpdate update) {
  bucket.updates.push_back(std::move(update));
  if (bucket.updates.size() <= kRetainedUpdates) return;
  const uint64_t version = bucket.version - kRetainedUpdates;
  RetainedUpdate oldest = std::move(bucket.updates.front());
  bucket.updates.pop_front();
  if (!oldest.deferred && bucket.owed.empty()) return;
  absl::MutexLock lock(&mu_);
  if (oldest.deferred) bucket.owed[version] = std::move(oldest.chunks);
  const uint32_t b = bucket.layout->bucket;
  std::erase_if(bucket.owed, [&](const auto& owed)
                                 ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !machine_.MayAskFor(b, owed.first - 1); });
  if (bucket.owed.size() > kOwedUpdates) bucket.owed.erase(bucket.owed.begin());
}

bool JobShard::HasParameters() const {
  absl::MutexLock lock(&mu_);
  return machine_.initialized();
}

bool JobShard::RoundInProgress() const {
  absl::MutexLock lock(&mu_);
  return shut_.ok() && machine_.open() && machine_.MembersOfRound() > 0 && machine_.RoundHasContributions();
}

void JobShard::Shut(absl::Status status) {
  std::multimap<MemberId, std::shared_ptr<Outbox>> streams;
  {
    absl::MutexLock lock(&mu_);
    if (!shut_.ok()) return;
    shut_ = status;
    streams.swap(streams_);
  }
  for (const auto& [member, stream] : streams) stream->Finish(status);
}

v1::JobStatus JobShard::Describe(bool with_details, bool digest) {
  v1::JobStatus status;
  uint64_t version = UINT64_MAX;
  Sha256 sha;
  std::vector<float> parameters;
  for (const auto& bucket : buckets_) {
    absl::MutexLock lock(&bucket->mu);
    version = std::min({version, bucket->version, bucket->durable});
    if (!digest || !job_.keeps_parameters()) continue;
    parameters.resize(bucket->layout->elements);
    bucket->store->Read({.parameter = parameters.data()});
    sha.Update(std::span<const float>(parameters));
  }
  status.set_job(job_.spec().name());
  status.set_shard_index(shard_index_);
  status.set_shard_count(layout_.shard_count());
  status.set_layout_digest(layout_.digest());
  status.set_version(version);
  if (digest) status.set_parameters_sha256(sha.Hex());
  status.set_memory_bytes(memory_.total());
  status.set_elements(layout_.shard_elements(shard_index_));
  status.set_push_bytes(push_bytes_);
  status.set_pull_bytes(pull_bytes_);
  status.set_initialize_bytes(initialize_bytes_);
  status.set_parameter_bytes(parameter_bytes_);
  status.set_deferred_elements(deferred_elements_);
  status.set_update_elements(update_elements_);
  status.set_refused_frames(refused_frames_);
  status.set_not_included_frames(not_included_frames_);
  DescribeDurability(version, &status);
  if (with_details) *status.mutable_spec() = job_.spec();
  const TimeNs now = environment_.clock->Now();
  absl::MutexLock lock(&mu_);
  status.set_initialized(machine_.initialized() || (replaying_ && version > 0));
  status.set_sanitized_elements(sanitized_elements_);
  v1::RoundStatus& rounds = *status.mutable_rounds();
  rounds.set_open_round(machine_.round());
  rounds.set_members(machine_.MembersOfRound());
  rounds.set_deadline_ms(static_cast<double>(machine_.deadline().value_or(0)) / kNsPerMs);
  rounds.set_short_rounds(machine_.short_rounds());
  if (!with_details) return status;
  for (const auto& [id, member] : machine_.membership().members()) {
    v1::WorkerStatus& worker = *status.add_workers();
    worker.set_worker(member.worker);
    worker.set_incarnation(member.incarnation);
    worker.set_member(machine_.InRound(member));
    if (member.start_round != Membership::kNever) worker.set_joined_round(member.start_round);
    worker.set_lease_left_ms((member.lease_end - now) / kNsPerMs);
    const auto totals = totals_.find(id);
    if (totals == totals_.end()) continue;
    worker.set_frames(totals->second.frames);
    worker.set_frame_bytes(totals->second.bytes);
    worker.set_sanitized_elements(totals->second.sanitized_elements);
  }
  return status;
}

void JobShard::DescribeDurability(uint64_t version, v1::JobStatus* job) {
  v1::DurabilityStatus* status = job->mutable_durability();
  status->set_level(job_.durable() ? job_.spec().durability().level() : v1::DURABILITY_NONE);
  if (sink_ == nullptr) return;
  const journal::JournalStatus journal = sink_->status();
  uint64_t durable = version;
  for (uint32_t b = 0; b < buckets_.size(); ++b) {
    const uint64_t written = b < journal.durable_versions.size() ? journal.durable_versions[b] : 0;
    durable = std::min(durable, std::max(written, recovered_version_));
  }
  status->set_durable_version(durable);
  status->set_degraded(journal.degraded);
  status->set_hole(journal.hole);
  status->set_reason(journal.reason);
  status->set_journal_bytes(journal.bytes);
  status->set_backlog_bytes(journal.backlog_bytes);
  status->set_records(journal.records);
  status->set_syncs(journal.syncs);
  status->set_failures(journal.failures);
  for (const journal::JournalStatus::Follower& follower : journal.followers) {
    v1::FollowerStatus& out = *job->add_followers();
    out.set_follower(follower.name);
    out.set_version(follower.version);
    out.set_in_sync(follower.in_sync);
  }
  absl::MutexLock lock(&snapshot_mu_);
  status->set_snapshot_version(snapshot_version_);
  status->set_snapshots(snapshots_);
  status->set_snapshot_error(std::string(snapshot_status_.message()));
}

}  // namespace gradwire

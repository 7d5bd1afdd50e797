// Making a job, and what concerns it as a whole; see job_shard.h.
#include "server/job/job_shard.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/job/round_mode.h"
#include "server/job/norm_state.h"
#include "server/job/spec_difference.h"
#include "server/rounds/async_machine.h"
#include "server/rounds/round.h"

namespace gradwire {
namespace {

constexpr TimeNs kNsPerMs = 1'000'000;
constexpr std::string_view kDeviceFlag = "--device-memory-limit-bytes";

ArraysLimit LimitOfArrays(const JobEnvironment& environment) {
  if (environment.device != nullptr) return {environment.device->memory_limit_bytes(), kDeviceFlag};
  return {environment.job_memory_limit_bytes, "--job-memory-limit-bytes"};
}

std::unique_ptr<Rounds> MakeRounds(const Job& job, const Layout& layout, const JobEnvironment& environment) {
  if (IsAsync(job)) {
    AsyncMachine::Rules rules;
    rules.buckets = layout.bucket_count();
    rules.window = PlansKept(job);
    rules.needs_initialization = job.keeps_parameters();
    rules.recognize_repeats = environment.recognize_repeats;
    rules.membership.max_workers = job.spec().max_workers();
    rules.membership.lease_ns = job.spec().lease_ms() * kNsPerMs;
    return std::make_unique<AsyncMachine>(rules);
  }
  RoundMachine::Rules rules;
  rules.buckets = layout.bucket_count();
  rules.min_workers = job.spec().min_workers();
  rules.needs_initialization = job.keeps_parameters();
  rules.recognize_repeats = environment.recognize_repeats;
  rules.membership.max_workers = job.spec().max_workers();
  rules.membership.lease_ns = job.spec().lease_ms() * kNsPerMs;
  rules.quorum = job.spec().rounds().quorum();
  rules.deviations = job.spec().rounds().deviations();
  rules.staleness = job.spec().rounds().staleness();
  rules.rounds_per_step = RoundsPerStep(job);
  return std::make_unique<RoundMachine>(rules);
}

}  // namespace

JobShard::JobShard(Job job, Layout layout, uint32_t shard_index, const JobEnvironment& environment)
    : job_(std::move(job)),
      layout_(std::move(layout)),
      shard_index_(shard_index),
      environment_(environment),
      rounds_(MakeRounds(job_, layout_, environment)),
      machine_(*rounds_),
      made_(environment.clock->Now()),
      used_(made_) {}

JobShard::~JobShard() {
  StopNorms();
  StopSink();
}

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
  return Make(std::move(job), shard_index, shard_count, environment);
}

absl::StatusOr<std::shared_ptr<JobShard>> JobShard::Make(Job job, uint32_t shard_index, uint32_t shard_count,
                                                         const JobEnvironment& environment) {
  if (shard_index >= shard_count) {
    return absl::InvalidArgumentError(absl::StrFormat("job '%s': shard index %d is not below the shard count %d",
                                                      job.spec().name(), shard_index, shard_count));
  }
  // Before the shard map: a spec of a few bytes can ask for one of any size.
  const ArraysLimit limit = LimitOfArrays(environment);
  GW_RETURN_IF_ERROR(CheckMemoryBeforeLayout(job, shard_index, shard_count, limit, environment.job_memory_limit_bytes));
  MemoryAccount::Share share;
  GW_RETURN_IF_ERROR(Reserve(job, environment, LayoutBytes(job, shard_count), &share));
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
  shard->share_ = std::move(share);
  GW_RETURN_IF_ERROR(shard->Prepare());
  return shard;
}

absl::Status JobShard::Reserve(const Job& job, const JobEnvironment& environment, uint64_t bytes,
                               MemoryAccount::Share* share) {
  if (environment.account == nullptr || MemoryAccount::Resize(environment.account, bytes, share)) {
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(absl::StrFormat(
      "job '%s' may take %d bytes of this server, and %d of its %d (--memory-limit-bytes) are taken by other jobs: use "
      "more shards, or delete one of those",
      job.spec().name(), bytes, environment.account->used() - share->bytes(), environment.account->limit_bytes()));
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
  unsent_limit_bytes_ = MaxUnsentBytes(job_, layout_, shard_index_, codecs);
  if (memory_.total() > environment_.job_memory_limit_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("job '%s': shard %d of %d may take %s; the limit per job is %d: use more shards or raise "
                        "--job-memory-limit-bytes",
                        job_.spec().name(), shard_index_, layout_.shard_count(), memory_.ToString(),
                        environment_.job_memory_limit_bytes));
  }
  GW_RETURN_IF_ERROR(Reserve(job_, environment_, memory_.total(), &share_));
  if (device != nullptr) GW_RETURN_IF_ERROR(job_.CheckGoesWith({Feature::kServersOnGpu}));
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
  return PrepareNorms();
}

absl::Status JobShard::Allocate(BucketState& bucket) {
  const uint32_t b = bucket.layout->bucket;
  GW_ASSIGN_OR_RETURN(bucket.store, arrays_->NewStore(b));
  for (uint32_t i = 0; i < OpenRounds(job_); ++i) {
    GW_ASSIGN_OR_RETURN(bucket.open.emplace_back().accumulator, arrays_->NewAccumulator(b, *bucket.codec));
  }
  bucket.ready = !job_.keeps_parameters();
  bucket.plans = PlanWindow(PlansKept(job_), bucket.codec->InitialPlan());
  OpenNextRounds(bucket);
  return absl::OkStatus();
}

void JobShard::OpenNextRounds(BucketState& bucket) {
  if (IsAsync(job_)) {  // the next frame opens it for itself
    bucket.open[0].round = OpenRound::kNone;
    return;
  }
  for (uint64_t round = bucket.version; round < bucket.version + bucket.open.size(); ++round) {
    const RoundPlan* plan = bucket.plans.OfRound(job_, round);
    if (plan == nullptr || bucket.Find(round) != nullptr) continue;
    OpenRound& open = bucket.open[round % bucket.open.size()];
    open.round = round;
    open.committed = 0;
    open.learning_rates.clear();
    open.nonfinite = false;
    open.replacement.reset();
    open.accumulator->Open(round, *plan);
  }
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

void JobShard::AbandonStream(const PushStream& stream) {
  for (const auto& bucket : buckets_) {
    absl::MutexLock lock(&bucket->mu);
    for (OpenRound& open : bucket->open) {
      const auto it = open.partial.find(stream.member);
      if (it != open.partial.end() && it->second.stream == &stream) AbandonPartial(*bucket, open, stream.member);
    }
    if (bucket->initializing_stream == &stream) {
      in_flight_bytes_ -= TotalSize(bucket->initial_chunks);
      bucket->initial_chunks.clear();
      bucket->initializing_stream = nullptr;
    }
    if (bucket->uploader == stream.out) bucket->uploader = nullptr;
  }
}

void JobShard::AbandonPartial(BucketState& bucket, OpenRound& open, MemberId member) {
  const auto it = open.partial.find(member);
  if (it == open.partial.end()) return;
  in_flight_bytes_ -= it->second.held_bytes;
  if (FrameAssembler* const assembler = it->second.assembler.get()) {
    assembler->Abandon();
    if (assembler->spoiled() && bucket.failure.ok()) {
      bucket.failure = absl::Status(absl::StatusCode::kResourceExhausted, "out of memory while taking back a frame");
    }
  }
  open.partial.erase(it);
}

bool JobShard::HasParameters() const {
  absl::MutexLock lock(&mu_);
  return machine_.initialized();
}

bool JobShard::Unused() const {
  absl::MutexLock lock(&mu_);
  return !replaying_ && recovered_version_ == 0 && !machine_.initialized() && machine_.membership().members().empty();
}

bool JobShard::RoundInProgress() const {
  absl::MutexLock lock(&mu_);
  return shut_.ok() && machine_.open() && machine_.MembersOfRound() > 0 && machine_.RoundHasContributions();
}

TimeNs JobShard::UnusedFor() const {
  absl::MutexLock lock(&mu_);
  return machine_.membership().members().empty() ? environment_.clock->Now() - used_ : 0;
}

absl::Status JobShard::ShutUnused(const absl::Status& status, std::optional<uint64_t> version, TimeNs unused_for) {
  const std::string& name = job_.spec().name();
  {
    absl::MutexLock lock(&mu_);
    GW_RETURN_IF_ERROR(shut_);
    const auto& members = machine_.membership().members();
    if (!members.empty()) {
      return absl::FailedPreconditionError(absl::StrFormat("job '%s' has %d workers, one of them is '%s'", name,
                                                           members.size(), members.begin()->second.worker));
    }
    if (version && *version != machine_.round()) {
      return absl::FailedPreconditionError(
          absl::StrFormat("job '%s' is at version %d, not %d", name, machine_.round(), *version));
    }
    if (environment_.clock->Now() - used_ < unused_for) {
      return absl::FailedPreconditionError(absl::StrFormat("job '%s' had a worker until now", name));
    }
    shut_ = status;  // nobody joins from here on, and nobody has a stream
  }
  StopNorms();
  return absl::OkStatus();
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
  StopNorms();
}

}  // namespace gradwire

// See make_job.h.
#include "server/job/make_job.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/job/norms.h"
#include "common/job/round_mode.h"
#include "server/job/by_rounds.h"

namespace gradwire {
namespace {

constexpr std::string_view kDeviceFlag = "--device-memory-limit-bytes";

ArraysLimit LimitOfArrays(const JobEnvironment& environment) {
  if (environment.device != nullptr) return {environment.device->memory_limit_bytes(), kDeviceFlag};
  return {environment.job_memory_limit_bytes, "--job-memory-limit-bytes"};
}

// ResourceExhausted: `bytes` do not fit beside the other jobs of this server.
absl::Status Reserve(const Job& job, const JobEnvironment& environment, uint64_t bytes, MemoryAccount::Share* share) {
  if (environment.account == nullptr || MemoryAccount::Resize(environment.account, bytes, share)) {
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(absl::StrFormat(
      "job '%s' may take %d bytes of this server, and %d of its %d (--memory-limit-bytes) are taken by other jobs: use "
      "more shards, or delete one of those",
      job.spec().name(), bytes, environment.account->used() - share->bytes(), environment.account->limit_bytes()));
}

absl::StatusOr<std::unique_ptr<JobArrays>> MakeArrays(const JobParts& parts,
                                                      const std::vector<std::unique_ptr<Codec>>& codecs) {
  kernels::cuda::DeviceShare* const device = parts.environment.device;
  if (device == nullptr) return MakeHostArrays(&parts.job, &parts.layout, parts.shard_index, parts.environment.backend);
  GW_RETURN_IF_ERROR(parts.job.CheckGoesWith({Feature::kServersOnGpu}));
  auto made = MakeDeviceArrays(&parts.job, &parts.layout, parts.shard_index, codecs, parts.environment.backend, device,
                               parts.memory.device);
  if (made.ok()) return made;
  return absl::Status(made.status().code(),
                      absl::StrFormat("job '%s': shard %d of %d: %s: use more shards, delete a job or raise %s",
                                      parts.job.spec().name(), parts.shard_index, parts.layout.shard_count(),
                                      std::string(made.status().message()), std::string(kDeviceFlag)));
}

absl::Status CheckBound(const JobParts& parts) {
  const uint64_t limit = parts.environment.job_memory_limit_bytes;
  if (parts.memory.total() <= limit) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrFormat(
      "job '%s': shard %d of %d may take %s; the limit per job is %d: use more shards or raise "
      "--job-memory-limit-bytes",
      parts.job.spec().name(), parts.shard_index, parts.layout.shard_count(), parts.memory.ToString(), limit));
}

absl::StatusOr<std::unique_ptr<BucketState>> MakeBucket(const JobParts& parts, uint32_t b,
                                                        std::unique_ptr<Codec> codec) {
  auto bucket = std::make_unique<BucketState>();
  bucket->layout = &parts.layout.at(b, parts.shard_index);
  bucket->codec = std::move(codec);
  absl::MutexLock lock(&bucket->mu);
  GW_ASSIGN_OR_RETURN(bucket->store, parts.arrays->NewStore(b));
  for (uint32_t i = 0; i < OpenRounds(parts.job); ++i) {
    GW_ASSIGN_OR_RETURN(bucket->open.emplace_back().accumulator, parts.arrays->NewAccumulator(b, *bucket->codec));
  }
  bucket->ready = !parts.job.keeps_parameters();
  bucket->plans = PlanWindow(PlansKept(parts.job), bucket->codec->InitialPlan());
  return bucket;
}

// Codecs, arrays and buckets.
absl::Status Fill(JobParts* parts) {
  std::vector<std::unique_ptr<Codec>> codecs;
  for (uint32_t b = 0; b < parts->layout.bucket_count(parts->shard_index); ++b) {
    GW_ASSIGN_OR_RETURN(std::unique_ptr<Codec> codec,
                        MakeCodec({&parts->job, &parts->layout.at(b, parts->shard_index), parts->environment.backend}));
    codecs.push_back(std::move(codec));
  }
  const JobEnvironment& environment = parts->environment;
  parts->memory = BoundMemory(parts->job, parts->layout, parts->shard_index, codecs, environment.frame_limit_bytes,
                              environment.device != nullptr);
  parts->unsent_limit_bytes = MaxUnsentBytes(parts->job, parts->layout, parts->shard_index, codecs);
  parts->in_flight.SetLimit(parts->memory.in_flight + environment.frame_limit_bytes);
  GW_RETURN_IF_ERROR(CheckBound(*parts));
  GW_RETURN_IF_ERROR(Reserve(parts->job, environment, parts->memory.total(), &parts->share));
  GW_ASSIGN_OR_RETURN(parts->arrays, MakeArrays(*parts, codecs));
  for (uint32_t b = 0; b < parts->layout.bucket_count(parts->shard_index); ++b) {
    GW_ASSIGN_OR_RETURN(std::unique_ptr<BucketState> bucket, MakeBucket(*parts, b, std::move(codecs[b])));
    parts->buckets.push_back(std::move(bucket));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckLayoutDigest(const Job& job, const Layout& layout, uint64_t layout_digest) {
  if (layout_digest == 0 || layout_digest == layout.digest()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrFormat(
      "job '%s': the worker's shard map has digest %016x, this server's %016x, from equal specs: worker "
      "and server run different versions of Gradwire",
      job.spec().name(), layout_digest, layout.digest()));
}

absl::StatusOr<std::unique_ptr<JobParts>> MakeJobParts(Job job, uint32_t shard_index, uint32_t shard_count,
                                                       const JobEnvironment& environment, uint64_t layout_digest) {
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
  GW_RETURN_IF_ERROR(CheckLayoutDigest(job, layout, layout_digest));
  // Before anything large is allocated or any codec prepared.
  const MemoryBound least =
      BoundMemory(job, layout, shard_index, {}, environment.frame_limit_bytes, environment.device != nullptr);
  if (const uint64_t bytes = least.parameters + least.moments + least.device; bytes > limit.bytes) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "job '%s': parameters and moments of shard %d of %d take %d bytes; the limit per job is %d: use "
        "more shards or raise %s",
        job.spec().name(), shard_index, shard_count, bytes, limit.bytes, std::string(limit.flag)));
  }
  std::unique_ptr<Rounds> rounds = MakeRounds(job, layout.bucket_count(shard_index), environment.recognize_repeats);
  auto parts =
      std::make_unique<JobParts>(std::move(job), std::move(layout), shard_index, environment, std::move(rounds));
  parts->share = std::move(share);
  GW_RETURN_IF_ERROR(Fill(parts.get()));
  return parts;
}

}  // namespace gradwire

// See replay.h.
#include "common/recovery/replay.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/frame/parameters.h"
#include "common/codec/update/update.h"
#include "common/codec/update/update_compressor.h"
#include "common/job/round_mode.h"
#include "common/journal/record_plan.h"

namespace gradwire {

absl::StatusOr<std::unique_ptr<ShardReplay>> ShardReplay::Make(const Job* job, const Layout* layout, uint32_t shard,
                                                               kernels::Backend* backend,
                                                               std::optional<ShardState> from) {
  std::unique_ptr<ShardReplay> replay(new ShardReplay(job, layout, shard, backend));
  GW_RETURN_IF_ERROR(replay->Prepare(std::move(from)));
  return replay;
}

absl::Status ShardReplay::Prepare(std::optional<ShardState> from) {
  const bool snapshot = from.has_value();
  if (snapshot) state_ = *std::move(from);
  state_.buckets.resize(buckets_.size());
  for (uint32_t b = 0; b < buckets_.size(); ++b) {
    const BucketLayout& slice = layout_.at(b, shard_);
    ShardState::Bucket& arrays = state_.buckets[b];
    Bucket& bucket = buckets_[b];
    if (snapshot) {
      bucket.version = state_.version + arrays.ahead;
      bucket.incarnation = 0;
    } else {
      GW_ASSIGN_OR_RETURN(const std::unique_ptr<Codec> codec, MakeCodec({&job_, &slice, &backend_}));
      arrays.plans = PlanWindow(PlansKept(job_), codec->InitialPlan());
      arrays.Allocate(job_, slice);
    }
    for (size_t r = 0; r < slice.runs.size(); ++r) {
      RunState run;
      if (!arrays.parameter.empty()) run.parameter = arrays.parameter.data() + slice.run_begin[r];
      if (!arrays.first_moment.empty()) run.first_moment = arrays.first_moment.data() + slice.run_begin[r];
      if (!arrays.second_moment.empty()) run.second_moment = arrays.second_moment.data() + slice.run_begin[r];
      bucket.runs.push_back(run);
    }
  }
  return absl::OkStatus();
}

absl::Status ShardReplay::Apply(const journal::Record& record, uint64_t until) {
  if (record.bucket >= buckets_.size()) {
    return absl::DataLossError(absl::StrFormat("job '%s': a record of bucket %d; the job has %d", job_.spec().name(),
                                               record.bucket, buckets_.size()));
  }
  Bucket& bucket = buckets_[record.bucket];
  if (bucket.stuck) return absl::OkStatus();
  absl::Status status = ApplyTo(bucket, record, until);
  bucket.stuck = !status.ok();
  return status;
}

absl::Status ShardReplay::ApplyTo(Bucket& bucket, const journal::Record& record, uint64_t until) {
  const BucketLayout& slice = layout_.at(record.bucket, shard_);
  ShardState::Bucket& arrays = state_.buckets[record.bucket];
  if (record.type == journal::RecordType::kInitial) {
    if (bucket.version > 0 || bucket.incarnation == uint64_t{0}) return absl::OkStatus();  // the snapshot is newer
    GW_RETURN_IF_ERROR(
        DecodeParameters(record.chunks, job_, slice, 0, {.parameter = arrays.parameter.data()}).status());
    GW_ASSIGN_OR_RETURN(const wire::FrameHeader header, wire::ParseHeader(record.chunks[0].span()));
    bucket.incarnation = header.incarnation;
    return absl::OkStatus();
  }
  if (record.type == journal::RecordType::kState) {
    const bool older = bucket.incarnation == uint64_t{0} && record.round <= bucket.version;
    if (older || record.round < bucket.version || record.round > until) return absl::OkStatus();
    GW_ASSIGN_OR_RETURN(arrays.plans, DecodeParameters(record.chunks, job_, slice, record.round, arrays.Targets()));
    bucket.version = record.round;
    bucket.incarnation = 0;
    return absl::OkStatus();
  }
  if (record.type == journal::RecordType::kKept) return absl::OkStatus();
  if (record.round < bucket.version || record.round >= until) return absl::OkStatus();
  if (record.round > bucket.version) {
    return absl::DataLossError(
        absl::StrFormat("bucket %d: the journal goes on with round %d where round %d should follow", record.bucket,
                        record.round, bucket.version));
  }
  GW_ASSIGN_OR_RETURN(const RoundPlan* const plan, PlanOfRecord(record, job_, arrays.plans));
  GW_ASSIGN_OR_RETURN(Update update, DecodeUpdate(record.chunks, job_, slice, *plan));
  if (!arrays.update_residual.empty()) {
    float* const residual = arrays.update_residual.data();
    GW_RETURN_IF_ERROR(ReplayResidual(job_, slice, *plan, record.mean_chunks, update, backend_, residual, &change_));
    change_.ApplyTo(residual);
  }
  GW_RETURN_IF_ERROR(ApplyUpdate(job_, slice, update, bucket.runs, backend_));
  arrays.plans.Push(std::move(update.next), update.skipped || update.replaces);
  ++bucket.version;
  return absl::OkStatus();
}

uint64_t ShardReplay::version() const {
  uint64_t version = UINT64_MAX;
  for (const Bucket& bucket : buckets_) version = std::min(version, bucket.version);
  return buckets_.empty() ? state_.version : version;
}

bool ShardReplay::whole() const {
  const uint64_t most = version() + 1 + job_.spec().rounds().staleness();  // as far as a round may be open
  return std::all_of(buckets_.begin(), buckets_.end(), [&](const Bucket& bucket) {
    const bool initialized = bucket.incarnation.has_value() && bucket.incarnation == buckets_[0].incarnation;
    return (initialized || !job_.keeps_parameters()) && (bucket.version <= most || IsAsync(job_));
  });
}

bool ShardReplay::empty() const {
  const bool initialized = whole() && job_.keeps_parameters();
  return !initialized && std::all_of(buckets_.begin(), buckets_.end(), [](const Bucket& b) { return b.version == 0; });
}

ShardState ShardReplay::Take() {
  state_.version = version();
  for (size_t b = 0; b < buckets_.size(); ++b) state_.buckets[b].ahead = buckets_[b].version - state_.version;
  return std::move(state_);
}

}  // namespace gradwire

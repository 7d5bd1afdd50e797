// What a shard says of itself; see job_shard.h.
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "server/job/job_shard.h"

namespace gradwire {
namespace {

constexpr TimeNs kNsPerStatusMs = 1'000'000;
constexpr TimeNs kNsPerStatusS = 1'000'000'000;

void DescribeTraffic(const Job& job, const BucketState& bucket, v1::BucketTraffic* out)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) {
  const Traffic& traffic = bucket.traffic;
  out->set_bucket(bucket.layout->bucket);
  out->set_codec(ToString(job.codecs()[bucket.layout->codec]));
  out->set_round(bucket.version - 1);
  out->set_contributors(traffic.contributors);
  out->set_dense_pushes(traffic.dense_pushes);
  out->set_dense_update(traffic.dense_update);
  out->set_density(traffic.density());
  out->set_gamma(traffic.gamma());
  const FormBytes bytes = BytesOfForms(traffic);
  out->set_dense_bytes(static_cast<uint64_t>(bytes.dense));
  out->set_coordinates_bytes(static_cast<uint64_t>(bytes.coordinates));
  out->set_bitmap_bytes(static_cast<uint64_t>(bytes.bitmap));
  out->set_gaps_bytes(static_cast<uint64_t>(bytes.gaps));
  out->set_sketch_bytes(static_cast<uint64_t>(bytes.sketch));
}

}  // namespace

v1::JobStatus JobShard::Describe(bool with_details, bool with_digest) {
  v1::JobStatus status;
  if (with_digest) status.set_parameters_sha256(digest_.Get().value_or(""));
  uint64_t version = UINT64_MAX;
  uint64_t nonfinite_rounds = UINT64_MAX;
  for (const auto& bucket : parts_.buckets) {
    absl::MutexLock lock(&bucket->mu);
    version = std::min({version, bucket->version, bucket->durable});
    nonfinite_rounds = std::min<uint64_t>(nonfinite_rounds, bucket->plans.nonfinite_rounds());
    if (with_details && bucket->traffic.contributors != 0) DescribeTraffic(parts_.job, *bucket, status.add_traffic());
  }
  status.set_job(parts_.job.spec().name());
  status.set_shard_index(parts_.shard_index);
  status.set_shard_count(parts_.layout.shard_count());
  status.set_layout_digest(parts_.layout.digest());
  status.set_version(version);
  status.set_memory_bytes(parts_.memory.total());
  status.set_elements(parts_.layout.shard_elements(parts_.shard_index));
  parts_.traffic.Describe(&status);
  log_.Describe(version, recovery_.version(), &status);
  if (log_.journals()) snapshots_.Describe(status.mutable_durability());
  if (with_details) *status.mutable_spec() = parts_.job.spec();
  absl::MutexLock lock(&parts_.mu);
  const TimeNs now = parts_.NowOfRounds();
  status.set_initialized(parts_.rounds->initialized() || (parts_.replaying && version > 0));
  v1::RoundStatus& rounds = *status.mutable_rounds();
  const Rounds::Status now_open = parts_.rounds->status();
  rounds.set_open_round(parts_.rounds->round());
  rounds.set_members(now_open.members);
  rounds.set_open(parts_.rounds->open());
  rounds.set_deadline_ms(static_cast<double>(now_open.deadline.value_or(0)) / kNsPerStatusMs);
  rounds.set_short_rounds(now_open.short_rounds);
  rounds.set_nonfinite_rounds(nonfinite_rounds);
  const bool unused = parts_.rounds->membership().members().empty();
  status.set_joined(static_cast<uint32_t>(parts_.rounds->membership().members().size()));
  status.set_age_s(static_cast<uint64_t>((now - attendance_.made()) / kNsPerStatusS));
  status.set_unused_s(unused ? static_cast<uint64_t>((now - attendance_.used()) / kNsPerStatusS) : 0);
  if (!with_details) return status;
  for (const auto& [id, member] : parts_.rounds->membership().members()) {
    v1::WorkerStatus& worker = *status.add_workers();
    worker.set_worker(member.worker);
    worker.set_incarnation(member.incarnation);
    worker.set_member(parts_.rounds->InRound(member));
    worker.set_connected(streams_.Has(id));
    worker.set_awaited(parts_.rounds->Awaits(member));
    worker.set_held_up_ms(static_cast<uint64_t>(parts_.rounds->HeldUp(member, now) / kNsPerStatusMs));
    if (member.start_round != Membership::kNever) worker.set_joined_round(member.start_round);
    worker.set_lease_left_ms((member.lease_end - now) / kNsPerStatusMs);
    parts_.traffic.DescribeWorker(id, &worker);
  }
  return status;
}

MemoryUse JobShard::MeasureMemory() {
  MemoryUse use;
  for (const auto& bucket : parts_.buckets) {
    absl::MutexLock lock(&bucket->mu);
    use.unfinished += TotalSize(bucket->upload.chunks);
    for (const OpenRound& open : bucket->open) {
      use.accumulators += open.accumulator->memory_bytes();
      use.partial_frames += open.partial.size();
      for (const auto& [member, partial] : open.partial) use.unfinished += partial.held_bytes;
    }
    for (const RetainedUpdate& update : bucket->updates) use.updates += TotalSize(update.frame->pieces());
    for (const auto& [version, frame] : bucket->owed) use.updates += TotalSize(frame->pieces());
    if (bucket->serialized != nullptr) use.serialized += TotalSize(bucket->serialized->pieces());
    use.retained_updates = std::max<uint64_t>(use.retained_updates, bucket->updates.size());
    use.owed_updates = std::max<uint64_t>(use.owed_updates, bucket->owed.size());
    std::map<MemberId, uint64_t> waiters;
    for (const Waiter& waiter : bucket->waiting) use.waiters = std::max(use.waiters, ++waiters[waiter.member]);
  }
  use.in_flight = parts_.in_flight.bytes();
  absl::MutexLock lock(&parts_.mu);
  use.histories = parts_.rounds->status().histories;
  use.totals = parts_.traffic.workers();
  return use;
}

}  // namespace gradwire

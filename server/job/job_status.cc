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

}  // namespace

void JobShard::DescribeTraffic(const BucketState& bucket, v1::BucketTraffic* out) const {
  const Traffic& traffic = bucket.traffic;
  out->set_bucket(bucket.layout->bucket);
  out->set_codec(ToString(job_.codecs()[bucket.layout->codec]));
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

v1::JobStatus JobShard::Describe(bool with_details, bool digest) {
  v1::JobStatus status;
  if (digest) status.set_parameters_sha256(Digest().value_or(""));
  uint64_t version = UINT64_MAX;
  uint64_t nonfinite_rounds = UINT64_MAX;
  for (const auto& bucket : buckets_) {
    absl::MutexLock lock(&bucket->mu);
    version = std::min({version, bucket->version, bucket->durable});
    nonfinite_rounds = std::min<uint64_t>(nonfinite_rounds, bucket->plans.nonfinite_rounds());
    if (with_details && bucket->traffic.contributors != 0) DescribeTraffic(*bucket, status.add_traffic());
  }
  status.set_job(job_.spec().name());
  status.set_shard_index(shard_index_);
  status.set_shard_count(layout_.shard_count());
  status.set_layout_digest(layout_.digest());
  status.set_version(version);
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
  rounds.set_open(machine_.open());
  rounds.set_deadline_ms(static_cast<double>(machine_.deadline().value_or(0)) / kNsPerStatusMs);
  rounds.set_short_rounds(machine_.short_rounds());
  rounds.set_nonfinite_rounds(nonfinite_rounds);
  const bool unused = machine_.membership().members().empty();
  status.set_joined(static_cast<uint32_t>(machine_.membership().members().size()));
  status.set_age_s(static_cast<uint64_t>((now - made_) / kNsPerStatusS));
  status.set_unused_s(unused ? static_cast<uint64_t>((now - used_) / kNsPerStatusS) : 0);
  if (!with_details) return status;
  for (const auto& [id, member] : machine_.membership().members()) {
    v1::WorkerStatus& worker = *status.add_workers();
    worker.set_worker(member.worker);
    worker.set_incarnation(member.incarnation);
    worker.set_member(machine_.InRound(member));
    worker.set_connected(streams_.contains(id));
    worker.set_awaited(machine_.Awaits(member));
    if (member.start_round != Membership::kNever) worker.set_joined_round(member.start_round);
    worker.set_lease_left_ms((member.lease_end - now) / kNsPerStatusMs);
    const auto totals = totals_.find(id);
    if (totals == totals_.end()) continue;
    worker.set_frames(totals->second.frames);
    worker.set_frame_bytes(totals->second.bytes);
    worker.set_sanitized_elements(totals->second.sanitized_elements);
  }
  return status;
}

MemoryUse JobShard::MeasureMemory() {
  MemoryUse use;
  for (const auto& bucket : buckets_) {
    absl::MutexLock lock(&bucket->mu);
    use.unfinished += TotalSize(bucket->initial_chunks);
    for (const OpenRound& open : bucket->open) {
      use.accumulators += open.accumulator->memory_bytes();
      use.partial_frames += open.partial.size();
      for (const auto& [member, partial] : open.partial) use.unfinished += partial.held_bytes;
    }
    for (const RetainedUpdate& update : bucket->updates) use.updates += TotalSize(*update.chunks);
    for (const auto& [version, chunks] : bucket->owed) use.updates += TotalSize(*chunks);
    if (bucket->serialized != nullptr) use.serialized += TotalSize(*bucket->serialized);
    use.retained_updates = std::max<uint64_t>(use.retained_updates, bucket->updates.size());
    use.owed_updates = std::max<uint64_t>(use.owed_updates, bucket->owed.size());
    std::map<MemberId, uint64_t> waiters;
    for (const Waiter& waiter : bucket->waiting) use.waiters = std::max(use.waiters, ++waiters[waiter.member]);
  }
  use.in_flight = in_flight_bytes_;
  absl::MutexLock lock(&mu_);
  use.histories = machine_.histories();
  use.totals = totals_.size();
  return use;
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

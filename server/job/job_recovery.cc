// Replaying a journal into a new shard; see job_shard.h.
#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/failpoint.h"
#include "common/base/status_macros.h"
#include "common/codec/frame/parameters.h"
#include "common/codec/update/update.h"
#include "common/job/round_mode.h"
#include "common/journal/record_plan.h"
#include "server/job/job_shard.h"

namespace gradwire {

absl::Status JobShard::Recover(const ShardState* snapshot,
                               const std::function<absl::Status(const RecordVisitor&)>& read) {
  GW_RETURN_IF_ERROR(Replay(snapshot, read));
  return EndReplay();
}

absl::Status JobShard::Replay(const ShardState* snapshot,
                              const std::function<absl::Status(const RecordVisitor&)>& read) {
  replay_ = std::make_unique<ReplayState>();
  replay_->buckets.resize(buckets_.size());
  replaying_ = true;
  if (snapshot != nullptr) {
    LoadSnapshot(*snapshot);
    for (uint32_t b = 0; b < buckets_.size(); ++b) {
      replay_->buckets[b].initial = true;
      replay_->buckets[b].base = snapshot->version + snapshot->buckets[b].ahead;
    }
    NoteSnapshot(snapshot->version, absl::OkStatus());
  }
  GW_FAILPOINT("recovery.after_snapshot");
  GW_RETURN_IF_ERROR(read([this](const journal::Record& record) -> absl::Status {
    GW_RETURN_IF_ERROR(ReplayRecord(record));
    GW_FAILPOINT("recovery.after_record");
    return absl::OkStatus();
  }));
  recovered_version_ = UINT64_MAX;
  for (const auto& bucket : buckets_) {
    absl::MutexLock lock(&bucket->mu);
    recovered_version_ = std::min(recovered_version_, bucket->version);
  }
  return absl::OkStatus();
}

absl::Status JobShard::Follow(journal::Record record, std::function<void()> safe) {
  const uint32_t bucket = record.bucket;
  const uint64_t version = journal::VersionOf(record);
  GW_RETURN_IF_ERROR(ReplayRecord(record));
  sink_->Append(std::move(record), [this, bucket, version, safe = std::move(safe)] {
    NoteWritten(bucket, version);
    safe();
  });
  return absl::OkStatus();
}

absl::Status JobShard::ReplayRecord(const journal::Record& record) {
  if (record.bucket >= buckets_.size()) {
    return absl::DataLossError(absl::StrFormat("job '%s': a record of bucket %d; the job has %d", job_.spec().name(),
                                               record.bucket, buckets_.size()));
  }
  switch (record.type) {
    case journal::RecordType::kInitial:
      return ReplayInitial(record);
    case journal::RecordType::kState:
      return ReplayWhole(record);
    case journal::RecordType::kUpdate:
      return ReplayUpdate(record);
    case journal::RecordType::kKept:
      return ReplayKept(record);
  }
  return absl::OkStatus();
}

absl::Status JobShard::ReplayInitial(const journal::Record& record) {
  ReplayState::Bucket& known = replay_->buckets[record.bucket];
  if (known.initial && known.incarnation == 0) return absl::OkStatus();  // a snapshot is newer
  BucketState& bucket = *buckets_[record.bucket];
  absl::MutexLock lock(&bucket.mu);
  GW_RETURN_IF_ERROR(bucket.store->Initialize(record.chunks));
  GW_ASSIGN_OR_RETURN(const wire::FrameHeader header, wire::ParseHeader(record.chunks[0].span()));
  known.initial = true;
  known.incarnation = header.incarnation;
  return absl::OkStatus();
}

absl::Status JobShard::ReplayWhole(const journal::Record& record) {
  ReplayState::Bucket& known = replay_->buckets[record.bucket];
  BucketState& bucket = *buckets_[record.bucket];
  absl::MutexLock lock(&bucket.mu);
  if (record.round < bucket.version || (known.initial && record.round <= known.base)) {
    return absl::OkStatus();  // a snapshot is newer
  }
  ShardState::Bucket state;
  state.Allocate(job_, *bucket.layout);
  GW_ASSIGN_OR_RETURN(PlanWindow plans,
                      DecodeParameters(record.chunks, job_, *bucket.layout, record.round, state.Targets()));
  bucket.store->Load(state.Arrays());
  bucket.version = record.round;
  bucket.plans = std::move(plans);
  bucket.updates.clear();
  known = {};
  known.initial = true;
  known.base = record.round;
  // With asynchronous rounds no updates follow that made it: its contributions tell as much.
  if (IsAsync(job_)) known.end_round = record.round;
  absl::MutexLock job_lock(&mu_);
  for (const journal::Contribution& c : record.contributions) {
    machine_.RestoreContribution(c.member, record.bucket, c.round, c.digest);
  }
  return absl::OkStatus();
}

absl::Status JobShard::ReplayUpdate(const journal::Record& record) {
  ReplayState::Bucket& known = replay_->buckets[record.bucket];
  BucketState& bucket = *buckets_[record.bucket];
  absl::MutexLock lock(&bucket.mu);
  if (record.round >= known.base && record.round != bucket.version) {
    return absl::DataLossError(
        absl::StrFormat("job '%s' bucket %d: the journal goes on with round %d where round %d should follow: what lies "
                        "between was given up when the disk failed; delete the job, or restore it from a snapshot",
                        job_.spec().name(), record.bucket, record.round, bucket.version));
  }
  known.first_round = std::min(known.first_round, record.round);
  known.end_round = record.round + 1;
  known.last = record.contributions;
  {
    absl::MutexLock job_lock(&mu_);
    for (const journal::Contribution& c : record.contributions) {
      if (c.included) machine_.RestoreContribution(c.member, record.bucket, c.round, c.digest);
    }
  }
  if (record.round < known.base) {               // applied there; kept for workers that ask for it again
    if (IsAsync(job_)) return absl::OkStatus();  // which nobody does
    GW_ASSIGN_OR_RETURN(const wire::FrameHeader header, wire::ParseHeader(record.chunks[0].span()));
    const bool skipped = (header.flags & wire::kNonFinite) != 0;
    Retain(bucket, record.round + 1,
           {std::make_shared<const std::vector<Bytes>>(record.chunks),
            bucket.IsOwed(skipped, (header.flags & wire::kReplace) != 0), skipped, record.contributions});
    return absl::OkStatus();
  }
  GW_ASSIGN_OR_RETURN(const RoundPlan* const plan, PlanOfRecord(record, job_, bucket.plans));
  GW_ASSIGN_OR_RETURN(Update update, DecodeUpdate(record.chunks, job_, *bucket.layout, *plan));
  UpdateFrame frame;
  frame.chunks = record.chunks;
  frame.mean = record.mean_chunks;
  frame.next = update.next;
  frame.stats.deferred = update.deferred.size();
  frame.skipped = update.skipped;
  frame.replaces = update.replaces;
  frame.decoded = std::make_shared<const Update>(std::move(update));
  GW_RETURN_IF_ERROR(bucket.store->ReplayCompression(*plan, frame));
  return Publish(bucket, frame, *plan, record.contributions);
}

absl::Status JobShard::ReplayKept(const journal::Record& record) {
  BucketState& bucket = *buckets_[record.bucket];
  absl::MutexLock lock(&bucket.mu);
  {
    absl::MutexLock job_lock(&mu_);
    for (const journal::Contribution& c : record.contributions) {
      machine_.RestoreContribution(c.member, record.bucket, c.round, c.digest);
    }
  }
  if (record.chunks.empty()) return absl::OkStatus();
  bucket.owed[record.round + 1] = std::make_shared<const std::vector<Bytes>>(record.chunks);
  LimitOwed(bucket);
  return absl::OkStatus();
}

std::vector<journal::Record> JobShard::KeptBefore(BucketState& bucket, uint64_t round) {
  LimitOwed(bucket);
  const uint32_t index = bucket.layout->bucket;
  std::map<uint64_t, journal::Record> kept;
  absl::MutexLock lock(&mu_);
  for (const PushHistory::Merged& frame : machine_.MergedOf(index)) {
    if (frame.round >= round) continue;
    const auto [it, added] =
        kept.try_emplace(frame.round, journal::Record{journal::RecordType::kKept, index, frame.round, {}, {}});
    it->second.contributions.push_back({frame.id, "", 0, frame.digest, true, frame.round});
    const auto owed = bucket.owed.find(frame.round + 1);
    if (added && owed != bucket.owed.end()) it->second.chunks = *owed->second;
  }
  std::vector<journal::Record> records;
  for (auto& [of, record] : kept) records.push_back(std::move(record));
  return records;
}

uint64_t JobShard::NewestVersion() {
  uint64_t newest = 0;
  for (const auto& bucket : buckets_) {
    absl::MutexLock lock(&bucket->mu);
    newest = std::max(newest, bucket->version);
  }
  return newest;
}

void JobShard::LoadSnapshot(const ShardState& snapshot) {
  for (uint32_t b = 0; b < buckets_.size(); ++b) {
    const ShardState::Bucket& from = snapshot.buckets[b];
    BucketState& bucket = *buckets_[b];
    absl::MutexLock lock(&bucket.mu);
    bucket.store->Load(from.Arrays());
    bucket.version = snapshot.version + from.ahead;
    bucket.plans = from.plans;
  }
}

absl::Status JobShard::EndReplay() {
  const std::unique_ptr<ReplayState> replay = std::move(replay_);
  bool initialized = true;
  uint64_t round = UINT64_MAX;
  uint64_t newest = 0;
  for (uint32_t b = 0; b < buckets_.size(); ++b) {
    absl::MutexLock lock(&buckets_[b]->mu);
    round = std::min(round, buckets_[b]->version);
    newest = std::max(newest, buckets_[b]->version);
    // A mixture of two workers' initial parameters was replaced before the end, or never was version 0.
    const bool whole = replay->buckets[b].initial && replay->buckets[b].incarnation == replay->buckets[0].incarnation;
    initialized = initialized && (whole || !job_.keeps_parameters());
  }
  if (!initialized && newest == 0) {  // it never began: workers upload again
    replaying_ = false;
    return absl::OkStatus();
  }
  if (!initialized || (!IsAsync(job_) && newest > round + OpenRounds(job_))) {
    return absl::DataLossError(
        absl::StrFormat("job '%s': the journal's buckets end between versions %d and %d%s: records are missing; delete "
                        "the job, or restore "
                        "it from a snapshot",
                        job_.spec().name(), round, newest, initialized ? "" : ", without their initial parameters"));
  }
  Rounds::Recovered recovered;
  recovered.round = round;
  std::set<std::pair<std::string, uint64_t>> workers;
  for (uint32_t b = 0; b < buckets_.size(); ++b) {
    const ReplayState::Bucket& known = replay->buckets[b];
    absl::MutexLock lock(&buckets_[b]->mu);
    const uint64_t version = buckets_[b]->version;
    buckets_[b]->ready = true;
    OpenNextRounds(*buckets_[b]);
    // The last update made this version, or there was none in the journal.
    if (known.end_round != version) buckets_[b]->updates.clear();
    recovered.versions.push_back(version);
    const uint64_t first = std::min(known.first_round, version);
    if (known.base > 0) recovered.known_from = std::max(recovered.known_from, first);
    // The snapshot got to disk, the records that made its version did not: whose frames are in it is not known.
    if (known.end_round < known.base) recovered.nothing_known_before = newest;
    // Whoever is in the open round contributed to every bucket of it that has closed.
    if (version != newest) continue;
    for (const journal::Contribution& c : known.last) {
      if (!c.worker.empty()) workers.emplace(c.worker, c.incarnation);
    }
  }
  for (const auto& [name, incarnation] : workers) recovered.workers.push_back({name, incarnation});
  deferred_elements_ = 0;  // of this server's rounds only
  RestoreNorms(round);
  absl::MutexLock lock(&mu_);
  machine_.Restore(recovered, environment_.clock->Now());
  replaying_ = false;
  return absl::OkStatus();
}

}  // namespace gradwire

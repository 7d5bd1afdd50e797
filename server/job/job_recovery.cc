// Replaying a journal into a new shard; see job_shard.h.
#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/failpoint.h"
#include "common/base/status_macros.h"
#include "common/codec/update.h"
#include "server/job/job_shard.h"

namespace gradwire {

// What is gathered beside the state of the buckets.
struct JobShard::Replay {
  struct Bucket {
    bool initial = false;                     // its initial parameters were found
    uint64_t incarnation = 0;                 // of the worker that uploaded them
    uint64_t first_round = UINT64_MAX;        // of its first record
    uint64_t end_round = 0;                   // behind its last record
    std::vector<journal::Contribution> last;  // of its last record
  };
  std::vector<Bucket> buckets;
  uint64_t snapshot_version = 0;
};

absl::Status JobShard::Recover(const ShardState* snapshot,
                               const std::function<absl::Status(const RecordVisitor&)>& read) {
  Replay replay;
  replay.buckets.resize(buckets_.size());
  if (snapshot != nullptr) {
    LoadSnapshot(*snapshot);
    replay.snapshot_version = snapshot->version;
    for (Replay::Bucket& bucket : replay.buckets) bucket.initial = true;
    NoteSnapshot(snapshot->version, absl::OkStatus());
  }
  GW_FAILPOINT("recovery.after_snapshot");
  GW_RETURN_IF_ERROR(read([&](const journal::Record& record) -> absl::Status {
    GW_RETURN_IF_ERROR(ReplayRecord(record, replay));
    GW_FAILPOINT("recovery.after_record");
    return absl::OkStatus();
  }));
  return EndReplay(replay);
}

absl::Status JobShard::ReplayRecord(const journal::Record& record, Replay& replay) {
  if (record.bucket >= buckets_.size()) {
    return absl::DataLossError(absl::StrFormat("job '%s': a record of bucket %d; the job has %d", job_.spec().name(),
                                               record.bucket, buckets_.size()));
  }
  if (record.type == journal::RecordType::kUpdate) return ReplayUpdate(record, replay);
  if (replay.buckets[record.bucket].initial && replay.buckets[record.bucket].incarnation == 0) {
    return absl::OkStatus();  // a snapshot is newer
  }
  BucketState& bucket = *buckets_[record.bucket];
  absl::MutexLock lock(&bucket.mu);
  GW_RETURN_IF_ERROR(bucket.store->Initialize(record.chunks));
  GW_ASSIGN_OR_RETURN(const wire::FrameHeader header, wire::ParseHeader(record.chunks[0].span()));
  replay.buckets[record.bucket].initial = true;
  replay.buckets[record.bucket].incarnation = header.incarnation;
  return absl::OkStatus();
}

absl::Status JobShard::ReplayUpdate(const journal::Record& record, Replay& replay) {
  BucketState& bucket = *buckets_[record.bucket];
  absl::MutexLock lock(&bucket.mu);
  Replay::Bucket& replayed = replay.buckets[record.bucket];
  replayed.first_round = std::min(replayed.first_round, record.round);
  replayed.end_round = record.round + 1;
  replayed.last = record.contributions;
  {
    absl::MutexLock job_lock(&mu_);
    for (const journal::Contribution& c : record.contributions) {
      if (c.included) machine_.RestoreContribution(c.member, record.bucket, record.round, c.digest);
    }
  }
  if (record.round < replay.snapshot_version) {  // applied there; kept for workers that ask for it again
    bucket.updates.push_back({std::make_shared<const std::vector<Bytes>>(record.chunks), false});
    if (bucket.updates.size() > kRetainedUpdates) bucket.updates.pop_front();
    return absl::OkStatus();
  }
  if (record.round != bucket.version) {
    return absl::DataLossError(
        absl::StrFormat("job '%s' bucket %d: the journal goes on with round %d where round %d should follow: what lies "
                        "between was given up when the disk failed; delete the job, or restore it from a snapshot",
                        job_.spec().name(), record.bucket, record.round, bucket.version));
  }
  GW_ASSIGN_OR_RETURN(const Update update, DecodeUpdate(record.chunks, job_, *bucket.layout, bucket.plan));
  UpdateFrame frame;
  frame.chunks = record.chunks;
  frame.next = update.next;
  frame.stats.deferred = update.deferred.size();
  return Publish(bucket, frame);
}

void JobShard::LoadSnapshot(const ShardState& snapshot) {
  for (uint32_t b = 0; b < buckets_.size(); ++b) {
    const ShardState::Bucket& from = snapshot.buckets[b];
    BucketState& bucket = *buckets_[b];
    absl::MutexLock lock(&bucket.mu);
    ParameterArrays arrays;
    if (!from.parameter.empty()) arrays.parameter = from.parameter.data();
    if (!from.first_moment.empty()) arrays.first_moment = from.first_moment.data();
    if (!from.second_moment.empty()) arrays.second_moment = from.second_moment.data();
    bucket.store->Load(arrays);
    bucket.version = snapshot.version;
    bucket.plan = from.plan;
    bucket.accumulator->Open(bucket.version, bucket.plan);
  }
}

absl::Status JobShard::EndReplay(Replay& replay) {
  bool initialized = true;
  uint64_t round = UINT64_MAX;
  uint64_t newest = 0;
  for (uint32_t b = 0; b < buckets_.size(); ++b) {
    absl::MutexLock lock(&buckets_[b]->mu);
    round = std::min(round, buckets_[b]->version);
    newest = std::max(newest, buckets_[b]->version);
    // A mixture of two workers' initial parameters was replaced before the end, or never was version 0.
    const bool whole = replay.buckets[b].initial && replay.buckets[b].incarnation == replay.buckets[0].incarnation;
    initialized = initialized && (whole || !job_.keeps_parameters());
  }
  if (!initialized && newest == 0) return absl::OkStatus();  // it never began: workers upload again
  if (!initialized || newest > round + 1) {
    return absl::DataLossError(
        absl::StrFormat("job '%s': the journal's buckets end between versions %d and %d%s: records are missing; delete "
                        "the job, or restore "
                        "it from a snapshot",
                        job_.spec().name(), round, newest, initialized ? "" : ", without their initial parameters"));
  }
  RoundMachine::Recovered recovered;
  recovered.round = round;
  std::set<std::pair<std::string, uint64_t>> workers;
  for (uint32_t b = 0; b < buckets_.size(); ++b) {
    const Replay::Bucket& known = replay.buckets[b];
    absl::MutexLock lock(&buckets_[b]->mu);
    const uint64_t version = buckets_[b]->version;
    buckets_[b]->ready = true;
    // The last update made this version, or there was none in the journal.
    if (known.end_round != version) buckets_[b]->updates.clear();
    recovered.versions.push_back(version);
    const uint64_t first = std::min(known.first_round, version);
    if (replay.snapshot_version > 0) recovered.known_from = std::max(recovered.known_from, first);
    // Whoever is in the open round contributed to every bucket of it that has closed.
    if (version != newest) continue;
    for (const journal::Contribution& c : known.last) {
      if (!c.worker.empty()) workers.emplace(c.worker, c.incarnation);
    }
  }
  for (const auto& [name, incarnation] : workers) recovered.workers.push_back({name, incarnation});
  recovered_version_ = round;
  deferred_elements_ = 0;  // of this server's rounds only
  absl::MutexLock lock(&mu_);
  machine_.Restore(recovered, environment_.clock->Now());
  return absl::OkStatus();
}

}  // namespace gradwire

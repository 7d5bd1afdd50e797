// Replaying a journal into a new shard; see job_shard.h.
#include <deque>
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
    bool initial = false;      // its initial parameters were found
    uint64_t incarnation = 0;  // of the worker that uploaded them
    // Of the last rounds, as many as updates are retained; the newest is behind.
    std::deque<std::pair<uint64_t, std::vector<journal::Contribution>>> contributions;

    const std::vector<journal::Contribution>* Of(uint64_t round) const {
      for (const auto& [r, list] : contributions) {
        if (r == round) return &list;
      }
      return nullptr;
    }
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
  auto& contributions = replay.buckets[record.bucket].contributions;
  contributions.emplace_back(record.round, record.contributions);
  if (contributions.size() > kRetainedUpdates) contributions.pop_front();
  if (record.round < replay.snapshot_version) {  // applied there; kept for workers that ask for it again
    bucket.updates.push_back(std::make_shared<const std::vector<Bytes>>(record.chunks));
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
  recovered.buckets.resize(buckets_.size());
  std::set<std::pair<std::string, uint64_t>> workers;
  const auto gather = [&](const std::vector<journal::Contribution>* list, RoundMachine::Contributions* out,
                          bool members) {
    if (list == nullptr) return;
    for (const journal::Contribution& c : *list) {
      (*out)[c.member] = {c.included, c.digest};
      if (members && !c.worker.empty()) workers.emplace(c.worker, c.incarnation);
    }
  };
  for (uint32_t b = 0; b < buckets_.size(); ++b) {
    RoundMachine::Recovered::Bucket& bucket = recovered.buckets[b];
    absl::MutexLock lock(&buckets_[b]->mu);
    buckets_[b]->ready = true;
    // The last update made this version, or there was none in the journal.
    const auto& known = replay.buckets[b].contributions;
    if (known.empty() || known.back().first + 1 != buckets_[b]->version) buckets_[b]->updates.clear();
    bucket.closed = buckets_[b]->version > round;
    // Whoever is in the open round contributed to every bucket of it that has closed.
    if (bucket.closed) gather(replay.buckets[b].Of(round), &bucket.current, true);
    if (round > 0) gather(replay.buckets[b].Of(round - 1), &bucket.previous, newest == round);
  }
  for (const auto& [name, incarnation] : workers) recovered.workers.push_back({name, incarnation});
  recovered_version_ = round;
  absl::MutexLock lock(&mu_);
  machine_.Restore(recovered, environment_.clock->Now());
  return absl::OkStatus();
}

}  // namespace gradwire

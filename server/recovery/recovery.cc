// See recovery.h.
#include "server/recovery/recovery.h"

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

namespace gradwire {
namespace {

// A journal that gave records up goes on behind them; a snapshot has made good what they did, not what they told. Where
// its first record is the one behind the snapshot, those that workers may ask about are missing, too, unless a state
// tells all of it (PastRounds::StateTellsAll).
bool MissesRecordsBefore(uint64_t round, const ReplayState::Bucket& known, bool state_tells_all) {
  if (known.first_round != UINT64_MAX) return round > known.end_round;
  return !state_tells_all && known.from_snapshot && known.base > 0 && round >= known.base;
}

}  // namespace

absl::Status Recovery::Recover(const ShardState* snapshot, const ReadRecords& read) {
  GW_RETURN_IF_ERROR(Begin(snapshot, read));
  return End();
}

absl::Status Recovery::Begin(const ShardState* snapshot, const ReadRecords& read) {
  replay_ = std::make_unique<ReplayState>();
  replay_->buckets.resize(parts_.buckets.size());
  parts_.replaying = true;
  if (snapshot != nullptr) {
    Load(*snapshot);
    for (uint32_t b = 0; b < parts_.buckets.size(); ++b) {
      replay_->buckets[b].initial = true;
      replay_->buckets[b].from_snapshot = true;
      replay_->buckets[b].base = snapshot->version + snapshot->buckets[b].ahead;
    }
    snapshots_.NoteTaken(snapshot->version, absl::OkStatus());
  }
  GW_FAILPOINT("recovery.after_snapshot");
  GW_RETURN_IF_ERROR(read([this](const journal::Record& record) -> absl::Status {
    GW_RETURN_IF_ERROR(Replay(record));
    GW_FAILPOINT("recovery.after_record");
    return absl::OkStatus();
  }));
  version_ = UINT64_MAX;
  for (const auto& bucket : parts_.buckets) {
    absl::MutexLock lock(&bucket->mu);
    version_ = std::min(version_, bucket->version);
  }
  return absl::OkStatus();
}

absl::Status Recovery::Follow(journal::Record record, std::function<void()> safe) {
  const uint32_t bucket = record.bucket;
  const uint64_t version = journal::VersionOf(record);
  GW_RETURN_IF_ERROR(Replay(record));
  log_.Append(std::move(record), [this, bucket, version, safe = std::move(safe)] {
    stages_.publish().NoteSafe(bucket, version);
    safe();
  });
  return absl::OkStatus();
}

absl::Status Recovery::Replay(const journal::Record& record) {
  if (record.bucket >= parts_.buckets.size()) {
    return absl::DataLossError(absl::StrFormat("job '%s': a record of bucket %d; the job has %d",
                                               parts_.job.spec().name(), record.bucket, parts_.buckets.size()));
  }
  switch (record.type) {
    case journal::RecordType::kInitial:
      return ReplayInitial(record);
    case journal::RecordType::kState:
      return ReplayWhole(record);
    case journal::RecordType::kUpdate:
      return ReplayUpdate(record);
    case journal::RecordType::kKept:
      return ReplayOwed(record);
  }
  return absl::OkStatus();
}

absl::Status Recovery::ReplayInitial(const journal::Record& record) {
  ReplayState::Bucket& known = replay_->buckets[record.bucket];
  if (known.initial && known.incarnation == 0) return absl::OkStatus();  // a snapshot is newer
  BucketState& bucket = *parts_.buckets[record.bucket];
  absl::MutexLock lock(&bucket.mu);
  GW_RETURN_IF_ERROR(bucket.store->Initialize(record.chunks));
  GW_ASSIGN_OR_RETURN(const wire::FrameHeader header, wire::ParseHeader(record.chunks[0].span()));
  known.initial = true;
  known.incarnation = header.incarnation;
  bucket.ready = true;
  return absl::OkStatus();
}

absl::Status Recovery::ReplayWhole(const journal::Record& record) {
  ReplayState::Bucket& known = replay_->buckets[record.bucket];
  BucketState& bucket = *parts_.buckets[record.bucket];
  absl::MutexLock lock(&bucket.mu);
  if (record.round < bucket.version || (known.initial && record.round <= known.base)) {
    return absl::OkStatus();  // a snapshot is newer
  }
  ShardState::Bucket state;
  state.Allocate(parts_.job, *bucket.layout);
  GW_ASSIGN_OR_RETURN(PlanWindow plans,
                      DecodeParameters(record.chunks, parts_.job, *bucket.layout, record.round, state.Targets()));
  bucket.store->Load(state.Arrays());
  bucket.version = record.round;
  bucket.plans = std::move(plans);
  bucket.updates.clear();
  bucket.ready = true;
  known = {};
  known.initial = true;
  known.base = record.round;
  if (past_.StateTellsAll()) known.end_round = record.round;
  absl::MutexLock job_lock(&parts_.mu);
  for (const journal::Contribution& c : record.contributions) {
    parts_.rounds->RestoreContribution(c.member, record.bucket, c.round, c.digest);
  }
  return absl::OkStatus();
}

absl::Status Recovery::ReplayUpdate(const journal::Record& record) {
  ReplayState::Bucket& known = replay_->buckets[record.bucket];
  BucketState& bucket = *parts_.buckets[record.bucket];
  absl::MutexLock lock(&bucket.mu);
  if (record.round >= known.base && record.round != bucket.version) {
    return absl::DataLossError(
        absl::StrFormat("job '%s' bucket %d: the journal goes on with round %d where round %d should follow: what lies "
                        "between was given up when the disk failed; delete the job, or restore it from a snapshot",
                        parts_.job.spec().name(), record.bucket, record.round, bucket.version));
  }
  if (MissesRecordsBefore(record.round, known, past_.StateTellsAll())) {
    known.gap_end = record.round;
    known.first_round = record.round;
    bucket.updates.clear();  // they would be taken for those of later versions
    bucket.owed_from = std::max(bucket.owed_from, record.round + 1);
  }
  known.first_round = std::min(known.first_round, record.round);
  known.end_round = record.round + 1;
  known.last = record.contributions;
  {
    absl::MutexLock job_lock(&parts_.mu);
    for (const journal::Contribution& c : record.contributions) {
      if (c.included) parts_.rounds->RestoreContribution(c.member, record.bucket, c.round, c.digest);
    }
  }
  if (record.round < known.base) return past_.KeepReplayed(bucket, record);  // applied there
  GW_ASSIGN_OR_RETURN(const RoundPlan* const plan, PlanOfRecord(record, parts_.job, bucket.plans));
  GW_ASSIGN_OR_RETURN(Update update, DecodeUpdate(record.chunks, parts_.job, *bucket.layout, *plan));
  UpdateFrame frame;
  frame.chunks = record.chunks;
  frame.mean = record.mean_chunks;
  frame.next = update.next;
  frame.stats.deferred = update.deferred.size();
  frame.skipped = update.skipped;
  frame.replaces = update.replaces;
  frame.decoded = std::make_shared<const Update>(std::move(update));
  GW_RETURN_IF_ERROR(bucket.store->ReplayCompression(*plan, frame));
  return stages_.apply().ApplyTo(bucket, frame, *plan, record.contributions);
}

absl::Status Recovery::ReplayOwed(const journal::Record& record) {
  if (record.chunks.empty() && record.contributions.empty()) {  // all workers had left
    for (ReplayState::Bucket& known : replay_->buckets) known.last.clear();
    return absl::OkStatus();
  }
  BucketState& bucket = *parts_.buckets[record.bucket];
  absl::MutexLock lock(&bucket.mu);
  {
    absl::MutexLock job_lock(&parts_.mu);
    for (const journal::Contribution& c : record.contributions) {
      parts_.rounds->RestoreContribution(c.member, record.bucket, c.round, c.digest);
    }
  }
  if (!record.chunks.empty()) past_.KeepOwed(bucket, record);
  return absl::OkStatus();
}

void Recovery::Load(const ShardState& snapshot) {
  for (uint32_t b = 0; b < parts_.buckets.size(); ++b) {
    const ShardState::Bucket& from = snapshot.buckets[b];
    BucketState& bucket = *parts_.buckets[b];
    absl::MutexLock lock(&bucket.mu);
    bucket.store->Load(from.Arrays());
    bucket.version = snapshot.version + from.ahead;
    bucket.plans = from.plans;
    bucket.ready = true;
  }
}

absl::Status Recovery::End() {
  const std::unique_ptr<ReplayState> replay = std::move(replay_);
  bool initialized = true;
  uint64_t oldest = UINT64_MAX;
  uint64_t newest = 0;
  for (uint32_t b = 0; b < parts_.buckets.size(); ++b) {
    absl::MutexLock lock(&parts_.buckets[b]->mu);
    oldest = std::min(oldest, parts_.buckets[b]->version);
    newest = std::max(newest, parts_.buckets[b]->version);
    // A mixture of two workers' initial parameters was replaced before the end, or never was version 0.
    const bool whole = replay->buckets[b].initial && replay->buckets[b].incarnation == replay->buckets[0].incarnation;
    initialized = initialized && (whole || !parts_.job.keeps_parameters());
  }
  if (!initialized && newest == 0) {  // it never began: workers upload again
    for (const auto& bucket : parts_.buckets) {
      absl::MutexLock lock(&bucket->mu);
      bucket->ready = false;
    }
    parts_.replaying = false;
    return absl::OkStatus();
  }
  if (!initialized || !FollowEachOther(oldest, newest)) {
    return absl::DataLossError(absl::StrFormat(
        "job '%s': the journal's buckets end between versions %d and %d%s: records are missing; delete "
        "the job, or restore "
        "it from a snapshot",
        parts_.job.spec().name(), oldest, newest, initialized ? "" : ", without their initial parameters"));
  }
  const Rounds::Recovered recovered = OpenBuckets(oldest, newest, *replay);
  parts_.traffic.ForgetReplayed();
  if (Agreement* const agreement = stages_.agreement()) agreement->Restore(oldest);
  absl::MutexLock lock(&parts_.mu);
  parts_.rounds->Restore(recovered, parts_.environment.clock->Now());
  parts_.replaying = false;
  return absl::OkStatus();
}

bool Recovery::FollowEachOther(uint64_t oldest, uint64_t newest) const {
  absl::MutexLock lock(&parts_.mu);
  const std::optional<uint64_t> most_apart = parts_.rounds->MostApart();
  return !most_apart || newest <= oldest + *most_apart;
}

Rounds::Recovered Recovery::OpenBuckets(uint64_t oldest, uint64_t newest, const ReplayState& replay) {
  Rounds::Recovered recovered;
  recovered.round = oldest;
  std::set<std::pair<std::string, uint64_t>> workers;
  for (uint32_t b = 0; b < parts_.buckets.size(); ++b) {
    const ReplayState::Bucket& known = replay.buckets[b];
    BucketState& bucket = *parts_.buckets[b];
    absl::MutexLock lock(&bucket.mu);
    bucket.ready = true;
    flow_.OpenNext(bucket);
    // The last update made this version, or there was none in the journal.
    if (known.end_round != bucket.version) bucket.updates.clear();
    recovered.versions.push_back(bucket.version);
    const uint64_t first = std::min(known.first_round, bucket.version);
    if (known.base > 0) recovered.known_from = std::max(recovered.known_from, first);
    // Whose frames were in rounds whose records are missing is not known. Where the snapshot got to disk, and the
    // records that made its version did not, those are the last ones.
    const uint64_t unknown = known.end_round < known.base ? newest : known.gap_end;
    recovered.nothing_known_before = std::max(recovered.nothing_known_before, unknown);
    // Whoever is in the open round contributed to every bucket of it that has closed.
    if (bucket.version != newest) continue;
    for (const journal::Contribution& c : known.last) {
      if (!c.worker.empty()) workers.emplace(c.worker, c.incarnation);
    }
  }
  for (const auto& [name, incarnation] : workers) recovered.workers.push_back({name, incarnation});
  return recovered;
}

std::vector<CopyPosition> Recovery::Positions() {
  std::vector<CopyPosition> positions;
  for (const auto& bucket : parts_.buckets) {
    journal::Record last{journal::RecordType::kUpdate, bucket->layout->bucket, 0, {}, {}};
    {
      absl::MutexLock lock(&bucket->mu);
      if (bucket->updates.empty() || replay_->buckets[last.bucket].end_round != bucket->version) return {};
      last.round = bucket->version - 1;
      last.contributions = bucket->updates.back().who;
      last.chunks = bucket->updates.back().frame->pieces();
    }
    positions.push_back({last.round + 1, DigestOf(last)});
  }
  return positions;
}

}  // namespace gradwire

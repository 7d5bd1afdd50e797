// See job_journal.h.
#include "server/journal/job_journal.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/journal/journal_reader.h"
#include "common/snapshot/snapshot_files.h"
#include "server/journal/journal.h"
#include "server/replication/epoch.h"

namespace gradwire {
namespace {

constexpr TimeNs kNsPerSpecMs = 1'000'000;
constexpr double kNsPerSecond = 1e9;

journal::JournalOptions OptionsOf(const JobShard& shard) {
  const v1::DurabilitySpec& spec = shard.job().spec().durability();
  journal::JournalOptions options;
  options.job = shard.job().spec().name();
  options.level = spec.level() == v1::DURABILITY_INTERVAL ? journal::Level::kInterval : journal::Level::kFsync;
  options.on_failure =
      spec.on_failure() == v1::DISK_FAILURE_CONTINUE ? journal::OnFailure::kContinue : journal::OnFailure::kWait;
  options.sync_interval_ns = spec.interval_ms() * kNsPerSpecMs;
  options.unsynced_limit_bytes = std::min(options.unsynced_limit_bytes, shard.memory().journal / 2);
  options.backlog_limit_bytes = shard.memory().journal;
  return options;
}

// The newest one that can be read; the journal reaches back to every one that is kept, and to the start where there is
// only one. Nothing: there is none, or `damage` says why.
absl::StatusOr<std::optional<ShardState>> NewestSnapshot(const DataDirectory& data, const JobShard& shard,
                                                         absl::Status* damage) {
  SnapshotFiles files(&data.disk(), data.SnapshotsOf(shard.job().spec().name()), &shard.job(), &shard.layout(),
                      shard.shard_index());
  const absl::Status tidied = files.RemoveUnfinished();
  if (!tidied.ok()) spdlog::warn("job {}: {}", shard.job().spec().name(), tidied.ToString());
  GW_ASSIGN_OR_RETURN(const std::vector<uint64_t> versions, files.Versions());
  std::vector<uint64_t> damaged;
  for (auto version = versions.rbegin(); version != versions.rend(); ++version) {
    absl::StatusOr<ShardState> state = files.Load(*version);
    if (state.ok()) {
      for (uint64_t useless : damaged) files.SetAside(useless).IgnoreError();  // else it counts on
      return std::optional<ShardState>(*std::move(state));
    }
    spdlog::error("job {}: {}", shard.job().spec().name(), state.status().ToString());
    if (absl::IsDataLoss(state.status())) damaged.push_back(*version);
    if (damage->ok()) *damage = state.status();
  }
  return std::optional<ShardState>();
}

absl::Status Unrecoverable(const absl::Status& damage) {
  return absl::Status(damage.code(),
                      absl::StrCat(std::string(damage.message()),
                                   ", and the journal alone does not bring the job back: put back a copy, restore it "
                                   "from the other shards' snapshots with `gradwire restore`, or delete the job"));
}

absl::Status JournalMissing(const std::string& directory) {
  return absl::DataLossError(
      absl::StrCat("the journal '", directory,
                   "' is missing: put it back from a copy, restore the job from the other shards' snapshots with "
                   "`gradwire restore`, or delete the job"));
}

// What this server writes behind records of a later epoch is damage to the next start. EPOCH was lost, or the job's
// directory is a copy from elsewhere.
absl::Status GoBehindEpoch(uint64_t written, bool may_raise, DataDirectory* data) {
  if (written <= data->epoch()) return absl::OkStatus();
  // Not that epoch itself: whoever was told it would take this server for that one.
  if (may_raise && CredibleAfter(data->epoch(), written)) {
    spdlog::warn("data directory {}: server epoch {} is below {}, by which its journals were written: it is raised",
                 data->path(), data->epoch(), written);
    return data->RaiseEpoch(written + 1);
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "its journal was written by a server of epoch ", written, ", and this one has ", data->epoch(), ": ", kEpochFile,
      " in '", data->path(), "' must be at least ", written,
      ". Stop this server, write that there, and start it again; or restore the job with `gradwire restore`"));
}

}  // namespace

absl::StatusOr<ReplicatedSink*> OpenJournal(DataDirectory& data, JobShard& shard, Clock* clock, const JournalUse& use) {
  const TimeNs begin = clock->Now();
  const std::string& name = shard.job().spec().name();
  journal::JournalWriter::Options options;
  options.directory = data.JournalOf(name);
  options.identity = {shard.job().digest(), shard.layout().digest(), shard.shard_index()};
  options.segment_bytes = use.segment_bytes;
  absl::Status damage;
  GW_ASSIGN_OR_RETURN(const std::optional<ShardState> snapshot, NewestSnapshot(data, shard, &damage));
  journal::ReadResult found;
  absl::Status replayed = shard.recovery().Begin(
      snapshot ? &*snapshot : nullptr, [&](const Recovery::RecordVisitor& visit) -> absl::Status {
        GW_ASSIGN_OR_RETURN(found,
                            ReadJournal(data.disk(), options.directory, options.identity, /*repair=*/true, visit));
        return absl::OkStatus();
      });
  if (absl::IsNotFound(replayed)) replayed = JournalMissing(options.directory);
  if (replayed.ok() && !use.following) replayed = shard.recovery().End();
  if (!damage.ok() && !snapshot && (!replayed.ok() || shard.NewestVersion() == 0)) return Unrecoverable(damage);
  GW_RETURN_IF_ERROR(replayed);
  GW_RETURN_IF_ERROR(GoBehindEpoch(found.epoch, use.may_raise_epoch, &data));
  options.epoch = data.epoch();
  if (found.records > 0) {
    spdlog::info("job {} recovered: {} records, {} bytes in {:.3f} s{}", name, found.records, found.bytes,
                 static_cast<double>(clock->Now() - begin) / kNsPerSecond,
                 found.torn_bytes > 0 ? "; an unfinished write at the end was cut off" : "");
  }
  auto writer = std::make_unique<journal::JournalWriter>(&data.disk(), std::move(options), std::move(found));
  auto journal = std::make_unique<journal::Journal>(OptionsOf(shard), std::move(writer), clock);
  std::unique_ptr<UpdateSink> log;
  if (use.adopt) {
    log = use.adopt(std::move(journal));
  } else {
    journal->Start();
    log = std::move(journal);
  }
  auto sink = std::make_unique<ReplicatedSink>(std::move(log), clock, use.replication);
  ReplicatedSink* const made = sink.get();
  shard.log().SetSink(std::move(sink));
  return made;
}

}  // namespace gradwire

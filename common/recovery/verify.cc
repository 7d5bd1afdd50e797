// See verify.h.
#include "common/recovery/verify.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/sha256.h"
#include "common/base/status_macros.h"
#include "common/job/round_mode.h"
#include "common/recovery/reach.h"
#include "common/recovery/replay.h"
#include "common/recovery/shard_files.h"
#include "common/snapshot/snapshot_format.h"
#include "common/snapshot/snapshot_reader.h"
#include "common/storage/data_directory.h"

namespace gradwire {
namespace {

constexpr int kLooks = 3;  // at a job whose server may remove files meanwhile

uint64_t BytesOf(Disk& disk, const std::string& directory) {
  uint64_t bytes = 0;
  for (const char* name : {snapshot::kManifest, snapshot::kParameters, snapshot::kState}) {
    const auto file = disk.Open(directory + "/" + name);
    if (file.ok()) bytes += (*file)->size();
  }
  return bytes;
}

// Checks every snapshot; the state of the newest good one.
std::optional<ShardState> CheckSnapshots(Disk& disk, const ShardFiles& files, ShardReport* report) {
  std::optional<ShardState> newest;
  for (const auto& [version, path] : files.snapshots) {
    SnapshotReport& snapshot = report->snapshots.emplace_back();
    snapshot.version = version;
    snapshot.bytes = BytesOf(disk, path);
    absl::StatusOr<ShardState> state = LoadSnapshot(disk, path, *files.job, *files.layout, files.shard);
    if (state.ok() && state->version != version) {
      state = absl::DataLossError(absl::StrFormat("'%s' is a snapshot of version %d", path, state->version));
    }
    snapshot.status = state.status();
    report->newest = std::max(report->newest, version);
    if (state.ok()) {
      for (const ShardState::Bucket& bucket : state->buckets) snapshot.versions.push_back(version + bucket.ahead);
      newest = *std::move(state);
    } else {
      report->damage.push_back({path, 0, std::string(state.status().message())});
    }
  }
  return newest;
}

void CheckReach(const JournalReach& reach, ShardReport* report) {
  report->oldest_round = reach.oldest_round();
  report->newest = std::max(report->newest, reach.newest());
  uint64_t furthest = 0;
  for (SnapshotReport& snapshot : report->snapshots) {
    if (!snapshot.status.ok()) continue;
    snapshot.recoverable_to = snapshot.versions.empty() ? snapshot.version : reach.ReplayedFrom(snapshot.versions);
    furthest = std::max(furthest, snapshot.recoverable_to);
  }
  // Without damage every snapshot that is kept can be gone on from.
  if (!report->damage.empty()) return;
  for (const SnapshotReport& snapshot : report->snapshots) {
    if (snapshot.recoverable_to == furthest) continue;
    report->damage.push_back(
        {report->path, 0,
         absl::StrFormat("the journal continues the snapshot of version %d to version %d only; others go to %d",
                         snapshot.version, snapshot.recoverable_to, furthest)});
  }
}

void AddDigest(const Job& job, const ShardState& state, ShardReport* report) {
  if (!job.keeps_parameters()) return;
  Sha256 sha;
  for (const ShardState::Bucket& bucket : state.buckets) sha.Update(std::span<const float>(bucket.parameter));
  report->parameters_sha256 = sha.Hex();
}

absl::Status CheckJournal(Disk& disk, const ShardFiles& files, ShardReplay& replay, ShardReport* report) {
  JournalReach reach(files.layout->bucket_count(files.shard));
  GW_ASSIGN_OR_RETURN(const journal::ReadResult read,
                      journal::InspectJournal(
                          disk, files.journal, files.identity(),
                          [&](const journal::Damage& damage) {
                            report->damage.push_back(damage);
                            report->refused = true;
                          },
                          [&](const journal::Record& record) {
                            reach.Note(record);
                            if (const absl::Status applied = replay.Apply(record); !applied.ok()) {
                              report->damage.push_back({files.journal, 0, std::string(applied.message())});
                              report->refused = true;
                            }
                            return absl::OkStatus();
                          }));
  report->segments = read.segments.size();
  if (!read.segments.empty()) report->first_segment = read.segments.front().sequence;
  report->bytes = read.bytes;
  report->records = read.records;
  report->torn_bytes = read.torn_bytes;
  report->epoch = read.epoch;
  CheckReach(reach, report);
  return absl::OkStatus();
}

absl::Status CheckShard(Disk& disk, const ShardFiles& files, kernels::Backend* backend, ShardReport* report) {
  report->job = files.job->spec().name();
  report->path = files.path;
  report->shard = files.shard;
  report->shards = files.layout->shard_count();
  if (!IsAsync(*files.job)) report->most_apart = MostApart(*files.job);
  if (!files.damage.ok()) {
    report->damage.push_back({files.path + "/" + kJobFile, 0, std::string(files.damage.message())});
    report->refused = true;
  }
  std::optional<ShardState> state = CheckSnapshots(disk, files, report);
  const bool no_snapshot = !state.has_value() && !files.snapshots.empty();
  GW_ASSIGN_OR_RETURN(const std::unique_ptr<ShardReplay> replay,
                      ShardReplay::Make(files.job.get(), files.layout.get(), files.shard, backend, std::move(state)));
  GW_RETURN_IF_ERROR(CheckJournal(disk, files, *replay, report));
  report->version = replay->whole() ? replay->version() : 0;
  report->refused = report->refused || no_snapshot || !(replay->whole() || replay->empty());
  if (report->refused && report->damage.empty()) {
    report->damage.push_back(
        {files.path, 0,
         absl::StrFormat("nothing can be recovered: initial parameters or records up to version %d are missing",
                         report->newest)});
  }
  if (replay->whole()) AddDigest(*files.job, replay->state(), report);
  return absl::OkStatus();
}

// Whatever is wrong with the directory of one job is damage.
ShardReport CheckJob(Disk& disk, const std::string& path, const std::string& name, kernels::Backend* backend) {
  ShardReport report;
  report.job = name;
  report.path = path;
  absl::StatusOr<ShardFiles> files = OpenJobDirectory(disk, path, name);
  absl::Status status = files.ok() ? CheckShard(disk, *files, backend, &report) : files.status();
  if (!status.ok()) {
    report.damage.push_back({path, 0, std::string(status.message())});
    report.refused = true;
  }
  return report;
}

}  // namespace

bool DirectoryReport::damaged() const {
  return !damage.empty() ||
         std::any_of(shards.begin(), shards.end(), [](const ShardReport& shard) { return !shard.damage.empty(); });
}

absl::StatusOr<DirectoryReport> VerifyDirectory(Disk& disk, const std::string& path, kernels::Backend* backend) {
  DirectoryReport report;
  report.path = path;
  absl::StatusOr<std::vector<std::string>> jobs = ListJobs(disk, path);
  if (absl::IsNotFound(jobs.status())) {
    return absl::NotFoundError(absl::StrFormat(
        "'%s' is no data directory: it has no folder '%s'; name what a server was given as --data-dir", path, kJobs));
  }
  GW_RETURN_IF_ERROR(jobs.status());
  const absl::StatusOr<bool> locked = disk.IsLocked(path + "/" + kLockFile);
  report.in_use = locked.ok() && *locked;
  const absl::StatusOr<uint64_t> epoch = ReadEpoch(disk, path);
  if (epoch.ok()) {
    report.epoch = *epoch;
  } else {
    report.damage.push_back({path + "/" + kEpochFile, 0, std::string(epoch.status().message())});
  }
  GW_ASSIGN_OR_RETURN(const std::vector<std::string> names, disk.List(path + "/" + kJobs));
  for (const std::string& name : names) {
    if (!name.ends_with(kJobSuffix)) report.leftovers.push_back(name);
  }
  for (const std::string& name : *jobs) {
    const std::string directory = absl::StrFormat("%s/%s/%s%s", path, kJobs, name, kJobSuffix);
    ShardReport shard = CheckJob(disk, directory, name, backend);
    for (int look = 1; look < kLooks && report.in_use && !shard.damage.empty(); ++look) {
      shard = CheckJob(disk, directory, name, backend);
    }
    report.shards.push_back(std::move(shard));
  }
  return report;
}

void CompareShards(std::vector<DirectoryReport>* reports) {
  std::map<std::string, const ShardReport*> furthest;  // by job
  for (const DirectoryReport& report : *reports) {
    if (report.in_use) continue;  // looked at some time later
    for (const ShardReport& shard : report.shards) {
      const ShardReport*& most = furthest[shard.job];
      if (most == nullptr || most->version < shard.version) most = &shard;
    }
  }
  for (DirectoryReport& report : *reports) {
    if (report.in_use) continue;
    for (ShardReport& shard : report.shards) {
      const ShardReport& most = *furthest[shard.job];
      if (!shard.most_apart || shard.refused || most.version <= shard.version + *shard.most_apart) continue;
      shard.damage.push_back(
          {shard.path, 0,
           absl::StrFormat("shard %d comes to version %d only, shard %d in '%s' to version %d: workers "
                           "cannot join; `gradwire restore` brings all shards to one version",
                           shard.shard, shard.version, most.shard, most.path, most.version)});
    }
  }
}

}  // namespace gradwire

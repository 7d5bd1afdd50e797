// See shard_files.h.
#include "common/recovery/shard_files.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/snapshot/snapshot_format.h"
#include "common/snapshot/snapshot_reader.h"
#include "common/storage/data_directory.h"

namespace gradwire {
namespace {

bool Has(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

absl::StatusOr<ShardFiles> MakeFiles(std::string path, Job job, uint32_t shard, uint32_t shards) {
  if (shard >= shards) {
    return absl::DataLossError(absl::StrFormat("'%s' says that it is shard %d of %d", path, shard, shards));
  }
  ShardFiles files;
  files.path = std::move(path);
  GW_ASSIGN_OR_RETURN(Layout layout, Layout::Make(job, shards));
  files.job = std::make_shared<const Job>(std::move(job));
  files.layout = std::make_shared<const Layout>(std::move(layout));
  files.shard = shard;
  return files;
}

absl::StatusOr<ShardFiles> FromStored(Disk& disk, const std::string& path, const std::string& name) {
  GW_ASSIGN_OR_RETURN(const v1::StoredJob stored, ReadStoredJob(disk, path, name));
  GW_ASSIGN_OR_RETURN(Job job, Job::Make(stored.spec()));
  return MakeFiles(path, std::move(job), stored.shard_index(), stored.shard_count());
}

absl::StatusOr<ShardFiles> FromManifest(Disk& disk, const std::string& path, const std::string& snapshot) {
  GW_ASSIGN_OR_RETURN(const SnapshotManifest manifest, ReadManifest(disk, snapshot));
  GW_ASSIGN_OR_RETURN(Job job, JobOf(manifest));
  return MakeFiles(path, std::move(job), manifest.shard, manifest.shards);
}

absl::StatusOr<ShardFiles> FromSnapshots(Disk& disk, const std::string& path, const std::string& directory) {
  GW_ASSIGN_OR_RETURN(const std::vector<uint64_t> versions, ListSnapshots(disk, directory));
  absl::Status status = absl::NotFoundError(absl::StrFormat("'%s' holds no snapshot", directory));
  for (auto version = versions.rbegin(); version != versions.rend(); ++version) {
    absl::StatusOr<ShardFiles> files = FromManifest(disk, path, SnapshotPath(directory, *version));
    if (files.ok()) return files;
    status = files.status();
  }
  return status;
}

absl::Status AddSnapshots(Disk& disk, const std::string& directory, ShardFiles* files) {
  GW_ASSIGN_OR_RETURN(const std::vector<uint64_t> versions, ListSnapshots(disk, directory));
  for (const uint64_t version : versions) files->snapshots[version] = SnapshotPath(directory, version);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ShardFiles> OpenJobDirectory(Disk& disk, const std::string& path, const std::string& name) {
  const std::string snapshots = path + "/" + kSnapshots;
  absl::StatusOr<ShardFiles> files = FromStored(disk, path, name);
  if (!files.ok()) {
    const absl::Status damage = files.status();
    files = FromSnapshots(disk, path, snapshots);
    if (!files.ok()) return damage;
    files->damage = damage;
  }
  GW_RETURN_IF_ERROR(AddSnapshots(disk, snapshots, &*files));
  files->journal = path + "/" + kJournal;
  return files;
}

absl::StatusOr<std::vector<std::string>> ListJobs(Disk& disk, const std::string& path) {
  GW_ASSIGN_OR_RETURN(const std::vector<std::string> names, disk.List(path + "/" + kJobs));
  std::vector<std::string> jobs;
  for (const std::string& name : names) {
    if (name.ends_with(kJobSuffix)) jobs.push_back(name.substr(0, name.size() - std::strlen(kJobSuffix)));
  }
  return jobs;
}

absl::StatusOr<std::vector<ShardFiles>> FindShards(Disk& disk, const std::string& path, const std::string& name) {
  GW_ASSIGN_OR_RETURN(const std::vector<std::string> names, disk.List(path));
  std::vector<ShardFiles> found;
  if (Has(names, kJobs)) {
    GW_ASSIGN_OR_RETURN(const std::vector<std::string> jobs, ListJobs(disk, path));
    GW_ASSIGN_OR_RETURN(const uint64_t epoch, ReadEpoch(disk, path));
    for (const std::string& job : jobs) {
      if (!name.empty() && job != name) continue;
      GW_ASSIGN_OR_RETURN(ShardFiles files,
                          OpenJobDirectory(disk, absl::StrFormat("%s/%s/%s%s", path, kJobs, job, kJobSuffix), job));
      files.epoch = epoch;
      found.push_back(std::move(files));
    }
    return found;
  }
  absl::StatusOr<ShardFiles> files = absl::NotFoundError(
      absl::StrFormat("'%s' is no data directory, no directory of a job or of its snapshots, and no snapshot", path));
  if (Has(names, snapshot::kManifest)) {
    files = FromManifest(disk, path, path);
    if (files.ok()) {
      GW_ASSIGN_OR_RETURN(const SnapshotManifest manifest, ReadManifest(disk, path));
      files->snapshots[manifest.version] = path;
    }
  } else if (Has(names, kSnapshots)) {
    files = FromSnapshots(disk, path, path + "/" + kSnapshots);
    if (files.ok()) {
      GW_RETURN_IF_ERROR(AddSnapshots(disk, path + "/" + kSnapshots, &*files));
      if (Has(names, kJournal)) files->journal = path + "/" + kJournal;
    }
  } else if (const auto versions = ListSnapshots(disk, path); versions.ok() && !versions->empty()) {
    files = FromSnapshots(disk, path, path);
    if (files.ok()) GW_RETURN_IF_ERROR(AddSnapshots(disk, path, &*files));
  }
  GW_RETURN_IF_ERROR(files.status());
  if (name.empty() || files->job->spec().name() == name) found.push_back(*std::move(files));
  return found;
}

}  // namespace gradwire

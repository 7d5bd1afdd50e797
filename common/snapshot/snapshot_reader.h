// Reads one snapshot, wherever its directory lies: what recovery, `verify` and `restore` begin with.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/job/job.h"
#include "common/job/layout.h"
#include "common/snapshot/shard_state.h"
#include "common/storage/disk.h"

namespace gradwire {

// "DIRECTORY/00000000000000000042"
std::string SnapshotPath(const std::string& directory, uint64_t version);
// Versions of the snapshots in `directory` that were written completely, ascending. None where there is no directory.
absl::StatusOr<std::vector<uint64_t>> ListSnapshots(Disk& disk, const std::string& directory);

// What a snapshot says of itself.
struct SnapshotManifest {
  std::string job;
  uint64_t version = 0;
  uint32_t shard = 0;
  uint32_t shards = 0;
  std::vector<uint64_t> ahead;                // per bucket, of `version`; empty: none is
  uint32_t nonfinite_rounds = 0;              // before `version`, that were skipped
  std::string job_digest;                     // hex
  std::string layout_digest;                  // hex
  std::map<std::string, std::string> sha256;  // by file name; hex
  std::string spec_json;
};

// `directory`: that of the snapshot. Errors: DataLoss (it is missing or is no manifest; the path is named), those of
// the disk.
absl::StatusOr<SnapshotManifest> ReadManifest(Disk& disk, const std::string& directory);

// The job that the snapshot is of, from the manifest alone. DataLoss where the spec is not the one of its digest.
absl::StatusOr<Job> JobOf(const SnapshotManifest& manifest);

// The state, checked against the digests of the manifest. Errors: DataLoss where digests, sizes or shapes do not fit,
// FailedPrecondition where it is that of another job, shard map or shard; both name the file.
absl::StatusOr<ShardState> LoadSnapshot(Disk& disk, const std::string& directory, const Job& job, const Layout& layout,
                                        uint32_t shard);

}  // namespace gradwire

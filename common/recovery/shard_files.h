// Where the files of one shard of a job lie: in a data directory, in a copy of one job's directory, or in copied
// snapshots.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/job/job.h"
#include "common/job/layout.h"
#include "common/journal/record.h"
#include "common/storage/disk.h"

namespace gradwire {

struct ShardFiles {
  std::string path;  // as it was given, or the job's directory in it
  std::shared_ptr<const Job> job;
  std::shared_ptr<const Layout> layout;
  uint32_t shard = 0;
  std::map<uint64_t, std::string> snapshots;  // by version: their directories; whole, but not checked
  std::string journal;                        // empty: there is none here
  uint64_t epoch = 0;                         // of the last server that ran here, as far as it is known
  absl::Status damage;  // of the file `job`: then job and shard are those of a snapshot's manifest

  journal::Identity identity() const { return {job->digest(), layout->digest(), shard}; }
};

// The directory of one job in a data directory, or a copy of it. DataLoss where neither the file `job` nor a snapshot's
// manifest says what it is.
absl::StatusOr<ShardFiles> OpenJobDirectory(Disk& disk, const std::string& path, const std::string& name);

// Every shard of every job, or of job `name` where it is not empty, that `path` holds: a data directory, a job's
// directory, the directory of its snapshots, or one snapshot. NotFound: it is none of these.
absl::StatusOr<std::vector<ShardFiles>> FindShards(Disk& disk, const std::string& path, const std::string& name);

// Names of the jobs of a data directory. NotFound where `path` is none.
absl::StatusOr<std::vector<std::string>> ListJobs(Disk& disk, const std::string& path);

}  // namespace gradwire

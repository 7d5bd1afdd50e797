// Checks what lies in a data directory by doing what a server does when it starts, and changes nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/journal/journal_reader.h"
#include "common/storage/disk.h"
#include "kernels/backend.h"

namespace gradwire {

struct SnapshotReport {
  uint64_t version = 0;
  uint64_t bytes = 0;
  absl::Status status;             // why it cannot be loaded
  std::vector<uint64_t> versions;  // of its buckets: with asynchronous rounds some are later ones
  uint64_t recoverable_to = 0;     // the version that it and the journal make
};

// One shard of a job.
struct ShardReport {
  std::string job;
  std::string path;
  uint32_t shard = 0;
  uint32_t shards = 0;
  std::vector<SnapshotReport> snapshots;  // ascending
  // Of the journal.
  uint64_t segments = 0;
  uint64_t first_segment = 0;
  uint64_t bytes = 0;
  uint64_t records = 0;
  uint64_t torn_bytes = 0;  // an unfinished write at the end; the next start cuts it off
  std::optional<uint64_t> oldest_round;
  uint64_t epoch = 0;  // of the server that wrote its last segment

  std::vector<journal::Damage> damage;  // empty: all is well
  uint64_t version = 0;                 // what can be recovered
  uint64_t newest = 0;                  // the newest version of which anything is there
  bool refused = false;                 // a server would not recover the job
  // How many versions shards of this job may be apart while nothing is lost; nothing: any number (asynchronous rounds).
  std::optional<uint64_t> most_apart;
  std::string parameters_sha256;  // of `version`, as `gradwire job describe --digest`; empty where it is refused
};

struct DirectoryReport {
  std::string path;
  uint64_t epoch = 0;
  bool in_use = false;  // a server runs there
  std::vector<std::string>
      leftovers;  // of jobs that were not made or not deleted completely; the next start removes them
  std::vector<ShardReport> shards;
  std::vector<journal::Damage> damage;  // that belongs to no shard
  bool damaged() const;
};

// Reads everything in the data directory `path`; in memory: one shard's state, and another one while a snapshot is
// checked. Where a server runs, what it removes meanwhile may be missed: such a job is looked at again, up to three
// times. Errors: NotFound (no data directory), those of the disk on directories. Anything wrong with a file is damage.
absl::StatusOr<DirectoryReport> VerifyDirectory(Disk& disk, const std::string& path, kernels::Backend* backend);

// Adds as damage what is wrong between the shards of one job that lie in these directories: versions further apart than
// rounds make them. Directories that a server uses are not compared: each was read at another time.
void CompareShards(std::vector<DirectoryReport>* reports);

}  // namespace gradwire

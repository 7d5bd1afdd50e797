// Puts the shards of a job together and deals them out anew, onto any number of shards, at any version that their
// snapshots and journals reach.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/storage/disk.h"
#include "kernels/backend.h"

namespace gradwire {

struct RestoreOptions {
  std::string job;                  // empty: the only one there is
  std::vector<std::string> from;    // what FindShards takes; together all shards of the job, in any order
  std::optional<uint64_t> version;  // none: the newest that all shards reach
  uint32_t shards = 0;              // of the restored job
  std::vector<uint32_t> write;      // which of them are written
  std::vector<std::string> to;      // their data directories, in the order of `write`
};

struct RestoreReport {
  struct Source {
    std::string path;
    uint32_t shard = 0;
    uint64_t snapshot = 0;  // it began with; 0: with the initial parameters, or with this version
    uint64_t replayed = 0;  // records of its journal
    uint64_t newest = 0;    // version that it could have reached
    bool journal = false;   // it has one
    bool in_use = false;    // a server runs there
  };
  std::string job;
  uint64_t version = 0;
  uint32_t shards = 0;
  std::vector<Source> sources;        // one per shard of the old job
  std::vector<std::string> warnings;  // what was passed over, and why
};

// Writes the data directories `to`: new ones, or ones that have no such job yet. Each job is there whole or not at all;
// after an error none of them is there. In memory: parameters and moments of the shards that are written, and of one
// source. Errors: InvalidArgument (options), NotFound (no such job or version; the message says which there are),
// FailedPrecondition (a shard is missing, sources of different jobs), AlreadyExists (a target), Unavailable (a target
// is in use), DataLoss.
absl::StatusOr<RestoreReport> RestoreJob(Disk& disk, const RestoreOptions& options, kernels::Backend* backend);

}  // namespace gradwire

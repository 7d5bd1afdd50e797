// Where update frames go before anyone may see them: the place of the journal.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "common/journal/record.h"

namespace gradwire {

namespace journal {

struct JournalStatus {
  // A standby that follows the job.
  struct Follower {
    std::string name;
    uint64_t version = 0;  // of every bucket
    bool in_sync = false;
  };
  bool degraded = false;  // a write or sync failed, and its records are not on disk yet
  bool hole = false;      // records were given up: what is on disk ends before them
  std::string reason;     // of the failure
  uint64_t records = 0;   // appended since the start
  uint64_t syncs = 0;
  uint64_t failures = 0;                   // times that it became degraded
  uint64_t bytes = 0;                      // of the segments on disk
  uint64_t backlog_bytes = 0;              // in memory only
  std::vector<uint64_t> durable_versions;  // per bucket, as in JournalWriter
  std::vector<Follower> followers;
};

}  // namespace journal

// Thread-safe. The records of different buckets come concurrently, those of one bucket in the order of their rounds.
class UpdateSink {
 public:
  virtual ~UpdateSink() = default;
  // Takes a record and returns at once. `visible` is called once, on a thread of the sink and without a lock held, when
  // the record meets the job's durability, or when the job's policy lets it go on without. It is not called after Stop.
  virtual void Append(journal::Record record, std::function<void()> visible) = 0;
  // Writes the records that wait, as far as the disk lets it, and returns when no `visible` runs any more. Idempotent.
  virtual void Stop() = 0;
  virtual journal::JournalStatus status() const = 0;
  // A snapshot of `version` is on disk: rounds before `keep_from` are not needed any more, and removed later.
  virtual void SnapshotTaken(uint64_t version, uint64_t keep_from) = 0;
};

}  // namespace gradwire

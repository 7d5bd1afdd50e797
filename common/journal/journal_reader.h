// Reads a journal from front to back: what recovery replays and what `verify` checks.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/journal/record.h"
#include "common/journal/segments.h"
#include "common/storage/disk.h"

namespace gradwire::journal {

struct ReadResult {
  std::vector<Segment> segments;  // ascending; as they are after a torn tail was cut off
  uint64_t epoch = 0;             // of the last segment; 0: there is none
  uint64_t records = 0;
  uint64_t bytes = 0;       // read
  uint64_t torn_bytes = 0;  // behind the last whole record
};

// Bytes that should be records and are not.
struct Damage {
  std::string path;
  uint64_t offset = 0;
  std::string what;
};

// Calls `visit` for every record in order. With `repair` a torn tail is cut off, a last segment without a header is
// removed, and what was read is synced when it returns. Nobody else writes meanwhile. Errors: DataLoss naming file and
// offset (JOURNAL.md, "What is
// torn, what is damaged"); FailedPrecondition (the journal of another job, shard map or shard); those of the disk and
// of `visit`.
absl::StatusOr<ReadResult> ReadJournal(Disk& disk, const std::string& directory, const Identity& identity, bool repair,
                                       const std::function<absl::Status(Record)>& visit);

// The same for a journal that may be damaged: changes nothing, tells `damaged` of every place and goes on with the next
// intact record. A segment of another job, shard map or shard is damage. Somebody may append meanwhile; where segments
// are removed meanwhile, they are missing. Errors: those of the disk and of `visit`.
absl::StatusOr<ReadResult> InspectJournal(Disk& disk, const std::string& directory, const Identity& identity,
                                          const std::function<void(const Damage&)>& damaged,
                                          const std::function<absl::Status(Record)>& visit);

}  // namespace gradwire::journal

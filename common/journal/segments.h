// The segment files of one journal: names, and what is known of those that exist.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/storage/disk.h"

namespace gradwire::journal {

struct Segment {
  uint64_t sequence = 0;
  uint64_t bytes = 0;
  std::optional<uint64_t> newest_round;  // of its records; nothing: it has none
};

// "DIRECTORY/00000000000000000042.journal"
std::string SegmentPath(const std::string& directory, uint64_t sequence);
// Sequence numbers of the segments in `directory`, ascending. Other files are not looked at.
absl::StatusOr<std::vector<uint64_t>> ListSegments(Disk& disk, const std::string& directory);

}  // namespace gradwire::journal

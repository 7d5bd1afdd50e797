// Small files that are there whole or not at all.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/storage/disk.h"

namespace gradwire {

// Writes beside, syncs, renames, syncs the directory. What could not be renamed is removed.
absl::Status WriteFileAtomically(Disk& disk, const std::string& directory, const std::string& name,
                                 std::span<const uint8_t> bytes);
// ResourceExhausted where the file has more than `limit_bytes`.
absl::StatusOr<std::vector<uint8_t>> ReadWholeFile(Disk& disk, const std::string& path, uint64_t limit_bytes);
// A file, or a directory with all that is in it. Ok where there is none.
absl::Status RemoveTree(Disk& disk, const std::string& path);

}  // namespace gradwire

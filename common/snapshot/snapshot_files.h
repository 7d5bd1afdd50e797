// The snapshots of one job on one shard, as files: proto/SNAPSHOT.md.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/job/job.h"
#include "common/job/layout.h"
#include "common/snapshot/shard_state.h"
#include "common/snapshot/snapshot_reader.h"
#include "common/storage/disk.h"

namespace gradwire {

// Not thread-safe. Borrows everything.
class SnapshotFiles {
 public:
  // `directory`: of this job's snapshots; made by the first Write.
  SnapshotFiles(Disk* disk, std::string directory, const Job* job, const Layout* layout, uint32_t shard)
      : disk_(disk), directory_(std::move(directory)), job_(job), layout_(layout), shard_(shard) {}

  // There completely, and on disk, when it returns ok; not at all otherwise. Ok where the version was written before.
  absl::Status Write(const ShardState& state);
  // Versions of what was written completely, ascending. None where there is no directory.
  absl::StatusOr<std::vector<uint64_t>> Versions() const { return ListSnapshots(*disk_, directory_); }
  // Errors: those of LoadSnapshot; DataLoss where it is that of another version.
  absl::StatusOr<ShardState> Load(uint64_t version) const;
  // Gives back the room of what interrupted Writes left; Write begins with it. Not while another one writes.
  absl::Status RemoveUnfinished();
  // Removes all but the newest `keep`, what an interrupted Write left and, once there are `keep`, what was set aside.
  // The oldest version that stays; 0 while there are fewer: one that turns out to be damaged must not be the only one.
  absl::StatusOr<uint64_t> RemoveOld(size_t keep);
  // Renames one that is damaged, so that it does not count any more.
  absl::Status SetAside(uint64_t version);

 private:
  absl::Status RemoveNamed(std::string_view ending);
  absl::Status WriteTo(const std::string& path, const ShardState& state) const;

  Disk* const disk_;
  const std::string directory_;
  const Job* const job_;
  const Layout* const layout_;
  const uint32_t shard_;
};

}  // namespace gradwire

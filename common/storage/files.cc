// See files.h.
#include "common/storage/files.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/failpoint.h"
#include "common/base/status_macros.h"

namespace gradwire {
namespace {

absl::Status WriteBeside(Disk& disk, const std::string& temporary, const std::string& path,
                         std::span<const uint8_t> bytes) {
  GW_ASSIGN_OR_RETURN(const std::unique_ptr<AppendFile> file, disk.Create(temporary));
  GW_RETURN_IF_ERROR(file->Append({&bytes, 1}));
  GW_RETURN_IF_ERROR(file->Sync());
  GW_FAILPOINT("file.before_rename");
  return disk.Rename(temporary, path);
}

}  // namespace

absl::Status WriteFileAtomically(Disk& disk, const std::string& directory, const std::string& name,
                                 std::span<const uint8_t> bytes) {
  const std::string path = directory + "/" + name;
  const std::string temporary = path + ".tmp";
  if (absl::Status gone = disk.Remove(temporary); !gone.ok() && !absl::IsNotFound(gone)) return gone;
  const absl::Status written = WriteBeside(disk, temporary, path, bytes);
  if (written.ok()) return disk.SyncDirectory(directory);
  disk.Remove(temporary).IgnoreError();  // gives the room back; otherwise the next one does
  return written;
}

absl::StatusOr<std::vector<uint8_t>> ReadWholeFile(Disk& disk, const std::string& path, uint64_t limit_bytes) {
  GW_ASSIGN_OR_RETURN(const std::unique_ptr<ReadFile> file, disk.Open(path));
  if (file->size() > limit_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("'%s' has %d bytes; at most %d are expected", path, file->size(), limit_bytes));
  }
  std::vector<uint8_t> bytes(file->size());
  GW_RETURN_IF_ERROR(file->Read(0, bytes));
  return bytes;
}

absl::Status RemoveTree(Disk& disk, const std::string& path) {
  const absl::Status removed = disk.Remove(path);
  if (removed.ok() || absl::IsNotFound(removed)) return absl::OkStatus();
  const absl::StatusOr<std::vector<std::string>> names = disk.List(path);
  if (!names.ok()) return removed;
  for (const std::string& name : *names) GW_RETURN_IF_ERROR(RemoveTree(disk, absl::StrCat(path, "/", name)));
  return disk.RemoveDirectory(path);
}

}  // namespace gradwire

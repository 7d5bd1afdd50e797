// See server_disk.h.
#include "tests/sim/server_disk.h"

#include <utility>

#include "common/base/status_macros.h"

namespace gradwire::sim {
namespace {

absl::Status Gone() { return absl::UnavailableError("the process is dead"); }

}  // namespace

template <typename F>
auto ServerDisk::Change(F call) -> decltype(call()) {
  if (dead()) return Gone();
  const bool now = die_in_ && (*die_in_)-- == 0;
  if (now && !die_after_) {
    dead_ = true;
    return Gone();
  }
  auto result = call();
  if (now) dead_ = true;
  if (now) return Gone();
  return result;
}

class ServerDisk::File final : public AppendFile {
 public:
  File(ServerDisk* disk, std::unique_ptr<AppendFile> file) : disk_(disk), file_(std::move(file)) {}
  absl::Status Append(std::span<const std::span<const uint8_t>> pieces) override {
    return disk_->Change([&] { return file_->Append(pieces); });
  }
  absl::Status Sync() override {
    return disk_->Change([&] { return file_->Sync(); });
  }

 private:
  ServerDisk* const disk_;
  const std::unique_ptr<AppendFile> file_;
};

absl::StatusOr<std::unique_ptr<AppendFile>> ServerDisk::Create(const std::string& path) {
  GW_ASSIGN_OR_RETURN(std::unique_ptr<AppendFile> file, Change([&] { return disk_->Create(path); }));
  return std::make_unique<File>(this, std::move(file));
}

absl::StatusOr<std::unique_ptr<ReadFile>> ServerDisk::Open(const std::string& path) {
  if (dead()) return Gone();
  return disk_->Open(path);
}

absl::StatusOr<std::unique_ptr<FileLock>> ServerDisk::Lock(const std::string& path) {
  if (dead()) return Gone();
  return disk_->Lock(path);
}

absl::Status ServerDisk::Truncate(const std::string& path, uint64_t bytes) {
  if (disk_->SizeOf(path) > bytes) ++truncated_;
  return Change([&] { return disk_->Truncate(path, bytes); });
}

absl::Status ServerDisk::Remove(const std::string& path) {
  if (path.ends_with(".journal")) ++removed_segments_;
  return Change([&] { return disk_->Remove(path); });
}

absl::Status ServerDisk::RemoveDirectory(const std::string& path) {
  return Change([&] { return disk_->RemoveDirectory(path); });
}

absl::Status ServerDisk::Rename(const std::string& from, const std::string& to) {
  return Change([&] { return disk_->Rename(from, to); });
}

absl::Status ServerDisk::CreateDirectory(const std::string& path) {
  return Change([&] { return disk_->CreateDirectory(path); });
}

absl::Status ServerDisk::SyncDirectory(const std::string& path) {
  return Change([&] { return disk_->SyncDirectory(path); });
}

absl::StatusOr<std::vector<std::string>> ServerDisk::List(const std::string& path) {
  if (dead()) return Gone();
  return disk_->List(path);
}

}  // namespace gradwire::sim

// One server process's view of the disk of its machine. When the process dies, it writes nothing any more, while the
// disk goes on under the next process.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/storage/disk.h"
#include "tests/lib/fake_disk.h"

namespace gradwire::sim {

// Not thread-safe. The disk outlives it.
class ServerDisk final : public Disk {
 public:
  explicit ServerDisk(testing_support::FakeDisk* disk) : disk_(disk) {}

  // The process dies at its call number `calls` from here on that changes the disk (0: the next one), before or after
  // that took effect.
  void DieAt(uint64_t calls, bool after) {
    die_in_ = calls;
    die_after_ = after;
  }
  void Die() { dead_ = true; }
  // The process is gone, by DieAt or because its machine has no power.
  bool dead() const { return dead_ || disk_->crashed(); }
  uint64_t truncated() const { return truncated_; }                // files that were cut or removed
  uint64_t removed_segments() const { return removed_segments_; }  // of journals

  // As Disk's.
  absl::StatusOr<std::unique_ptr<AppendFile>> Create(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<ReadFile>> Open(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<FileLock>> Lock(const std::string& path) override;
  absl::StatusOr<bool> IsLocked(const std::string& path) override { return disk_->IsLocked(path); }
  absl::Status Truncate(const std::string& path, uint64_t bytes) override;
  absl::Status Remove(const std::string& path) override;
  absl::Status RemoveDirectory(const std::string& path) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status CreateDirectory(const std::string& path) override;
  absl::Status SyncDirectory(const std::string& path) override;
  absl::StatusOr<std::vector<std::string>> List(const std::string& path) override;

 private:
  class File;
  // Runs `call`, which changes the disk, unless the process is dead before; its result is not heard of if it dies
  // after.
  template <typename F>
  auto Change(F call) -> decltype(call());

  testing_support::FakeDisk* const disk_;
  bool dead_ = false;
  std::optional<uint64_t> die_in_;
  bool die_after_ = false;
  uint64_t truncated_ = 0;
  uint64_t removed_segments_ = 0;
};

}  // namespace gradwire::sim

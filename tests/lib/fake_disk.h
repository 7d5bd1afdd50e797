// A disk in memory that behaves as badly as a real one may: it loses power after any call, tears writes that were not
// synced, flips bits, fills up and fails.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "common/storage/disk.h"

namespace gradwire::testing_support {

// Not thread-safe. Directories are prefixes of paths and exist when they were created. A file's bytes survive a loss of
// power up to its last sync; of what was written since, each sector does or does not. Names survive once their
// directory was synced; of later changes, a prefix does.
class FakeDisk final : public Disk {
 public:
  FakeDisk();
  ~FakeDisk() override;

  // The disk loses power before call number `call` (from 0, counted over all that change it) takes effect; a write may
  // have reached the disk in part by then. Every call from then on fails.
  void CrashAt(uint64_t call) { crash_at_ = call; }
  bool crashed() const { return crashed_; }
  uint64_t calls() const { return calls_; }
  // Power is back: what survived is what `random` and the syncs left. Open files are gone.
  void PowerCycle(std::mt19937& random);
  // Only the process died, by CrashAt or without: the system still has all that was written. Open files are gone.
  void ProcessDied();

  // Bytes of all files together; more gives ResourceExhausted, after as much was written as there was room for.
  void set_capacity(uint64_t bytes) { capacity_ = bytes; }
  // While set, syncs and writes fail with it.
  void set_sync_error(absl::Status status) { sync_error_ = std::move(status); }
  void set_write_error(absl::Status status) { write_error_ = std::move(status); }
  // Syncs of the directory `path` fail with it, but for the next `passing` ones.
  void set_directory_error(std::string path, absl::Status status, int passing = 0) {
    failing_directory_ = std::move(path);
    directory_error_ = std::move(status);
    passing_ = passing;
  }
  void FlipBit(const std::string& path, uint64_t bit);
  uint64_t SizeOf(const std::string& path) const;
  uint64_t TotalBytes() const;
  std::vector<std::string> Files() const;

  // As Disk's.
  absl::StatusOr<std::unique_ptr<AppendFile>> Create(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<ReadFile>> Open(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<FileLock>> Lock(const std::string& path) override;  // everybody gets it
  absl::StatusOr<bool> IsLocked(const std::string& path) override;
  absl::Status Truncate(const std::string& path, uint64_t bytes) override;
  absl::Status Remove(const std::string& path) override;
  absl::Status RemoveDirectory(const std::string& path) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status CreateDirectory(const std::string& path) override;
  absl::Status SyncDirectory(const std::string& path) override;
  absl::StatusOr<std::vector<std::string>> List(const std::string& path) override;

 private:
  class File;
  class Reader;
  struct Content {
    std::vector<uint8_t> bytes;
    std::vector<uint8_t> synced;
  };
  using Names = std::map<std::string, std::shared_ptr<Content>>;  // null: a directory
  // Of names in one directory; all of it or nothing survives.
  struct Change {
    std::string directory;
    std::vector<std::pair<std::string, std::optional<std::shared_ptr<Content>>>> edits;  // nothing: removed
  };

  // Counts a call; an error once the power is gone.
  absl::Status Begin();
  // FailedPrecondition: something is in this directory.
  absl::Status CheckEmpty(const std::string& path) const;
  void Apply(Change change);
  static void Edit(const Change& change, Names* names);

  Names names_;
  Names durable_;
  std::vector<Change> unsynced_;  // oldest first
  uint64_t calls_ = 0;
  std::optional<uint64_t> crash_at_;
  bool crashed_ = false;
  uint64_t power_cycles_ = 0;  // open files of an earlier one are dead
  uint64_t capacity_ = UINT64_MAX;
  absl::Status sync_error_;
  absl::Status write_error_;
  std::string failing_directory_;
  absl::Status directory_error_;
  int passing_ = 0;
};

}  // namespace gradwire::testing_support

// The file operations that the journal and snapshots use, behind an interface: a simulator or a test puts a disk in
// their place that tears writes, flips bits, fills up or loses power after any call.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace gradwire {

// A file that grows at its end. Not thread-safe. Destroying it closes it without syncing.
class AppendFile {
 public:
  virtual ~AppendFile() = default;
  // Writes `pieces` one behind the other. After an error any prefix of them may be in the file.
  virtual absl::Status Append(std::span<const std::span<const uint8_t>> pieces) = 0;
  // Returns once everything appended so far survives a loss of power. After an error none of what was appended since
  // the last success may be relied on, also if a later call succeeds.
  virtual absl::Status Sync() = 0;
  // Nobody reads soon what was synced: memory need not keep it. A hint.
  virtual void Forget() {}
};

// A file to read. Not thread-safe.
class ReadFile {
 public:
  virtual ~ReadFile() = default;
  virtual uint64_t size() const = 0;
  // Fills `out` from `offset` on. OutOfRange where the file ends before.
  virtual absl::Status Read(uint64_t offset, std::span<uint8_t> out) = 0;
};

// A file that this process alone has locked, as long as this lives.
class FileLock {
 public:
  virtual ~FileLock() = default;
};

// Thread-safe. Names survive a loss of power once their directory was synced. Errors name the path: NotFound,
// AlreadyExists, ResourceExhausted (the disk is full), PermissionDenied, Unknown (an I/O error).
class Disk {
 public:
  virtual ~Disk() = default;
  // AlreadyExists where there is such a file.
  virtual absl::StatusOr<std::unique_ptr<AppendFile>> Create(const std::string& path) = 0;
  virtual absl::StatusOr<std::unique_ptr<ReadFile>> Open(const std::string& path) = 0;
  // Creates the file where there is none. Unavailable where somebody else holds the lock.
  virtual absl::StatusOr<std::unique_ptr<FileLock>> Lock(const std::string& path) = 0;
  // Whether somebody holds the lock; changes nothing. False where there is no such file. Nobody can take the lock in
  // the instant of the call.
  virtual absl::StatusOr<bool> IsLocked(const std::string& path) = 0;
  // Cuts a file to `bytes` and syncs it.
  virtual absl::Status Truncate(const std::string& path, uint64_t bytes) = 0;
  virtual absl::Status Remove(const std::string& path) = 0;
  // Of an empty directory.
  virtual absl::Status RemoveDirectory(const std::string& path) = 0;
  // Atomic; replaces a file of the new name.
  virtual absl::Status Rename(const std::string& from, const std::string& to) = 0;
  // Ok where it exists.
  virtual absl::Status CreateDirectory(const std::string& path) = 0;
  virtual absl::Status SyncDirectory(const std::string& path) = 0;
  // Names of files and directories in `path`, sorted.
  virtual absl::StatusOr<std::vector<std::string>> List(const std::string& path) = 0;
};

}  // namespace gradwire

// System calls and their errors; see posix_disk.h.
#include "common/storage/posix_disk.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"

namespace gradwire {
namespace {

constexpr size_t kPiecesPerWrite = 64;  // below IOV_MAX everywhere
// Parameters are for nobody but the user that this runs as.
constexpr mode_t kFileMode = 0600;
constexpr mode_t kDirectoryMode = 0700;

// What people can do about it on this machine.
const char* AdviceFor(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return "; make room on that disk";
    case EACCES:
    case EPERM:
      return "; the user that runs this program has to be allowed to";
    case EROFS:
      return "; mount that disk writable";
    default:
      return "";
  }
}

absl::Status Failed(const char* what, const std::string& path) {
  const int error = errno;
  const absl::Status status = absl::ErrnoToStatus(error, absl::StrCat(what, " '", path, "'"));
  return absl::Status(status.code(), absl::StrCat(std::string(status.message()), AdviceFor(error)));
}

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  int get() const { return fd_; }
  bool ok() const { return fd_ >= 0; }

 private:
  const int fd_;
};

class PosixAppendFile final : public AppendFile {
 public:
  PosixAppendFile(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}

  absl::Status Append(std::span<const std::span<const uint8_t>> pieces) override {
    std::vector<iovec> left;
    left.reserve(pieces.size());
    for (const std::span<const uint8_t> piece : pieces) {
      if (!piece.empty()) left.push_back({const_cast<uint8_t*>(piece.data()), piece.size()});
    }
    for (size_t first = 0; first < left.size();) {
      const size_t count = std::min(kPiecesPerWrite, left.size() - first);
      const ssize_t wrote = writev(fd_.get(), &left[first], static_cast<int>(count));
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote < 0) return Failed("cannot write to", path_);
      for (size_t n = static_cast<size_t>(wrote); first < left.size(); ++first) {
        if (n < left[first].iov_len) {
          left[first].iov_base = static_cast<uint8_t*>(left[first].iov_base) + n;
          left[first].iov_len -= n;
          break;
        }
        n -= left[first].iov_len;
      }
    }
    return absl::OkStatus();
  }

  absl::Status Sync() override { return fdatasync(fd_.get()) == 0 ? absl::OkStatus() : Failed("cannot sync", path_); }
  void Forget() override { posix_fadvise(fd_.get(), 0, 0, POSIX_FADV_DONTNEED); }

 private:
  const FileDescriptor fd_;
  const std::string path_;
};

class PosixReadFile final : public ReadFile {
 public:
  PosixReadFile(int fd, uint64_t size, std::string path) : fd_(fd), size_(size), path_(std::move(path)) {}

  uint64_t size() const override { return size_; }
  absl::Status Read(uint64_t offset, std::span<uint8_t> out) override {
    while (!out.empty()) {
      const ssize_t n = pread(fd_.get(), out.data(), out.size(), static_cast<off_t>(offset));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return Failed("cannot read", path_);
      if (n == 0) return absl::OutOfRangeError(absl::StrCat("'", path_, "' ends at byte ", offset));
      offset += static_cast<uint64_t>(n);
      out = out.subspan(static_cast<size_t>(n));
    }
    return absl::OkStatus();
  }

 private:
  const FileDescriptor fd_;
  const uint64_t size_;
  const std::string path_;
};

struct PosixLock final : FileLock {
  explicit PosixLock(int descriptor) : fd(descriptor) {}
  const FileDescriptor fd;
};

absl::Status OpenAndSync(const std::string& path, int flags) {
  const FileDescriptor fd(open(path.c_str(), flags | O_CLOEXEC));
  if (!fd.ok()) return Failed("cannot open", path);
  return fsync(fd.get()) == 0 ? absl::OkStatus() : Failed("cannot sync", path);
}

}  // namespace

absl::StatusOr<std::unique_ptr<AppendFile>> PosixDisk::Create(const std::string& path) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, kFileMode);
  if (fd < 0) return Failed("cannot create", path);
  return std::make_unique<PosixAppendFile>(fd, path);
}

absl::StatusOr<std::unique_ptr<ReadFile>> PosixDisk::Open(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return Failed("cannot open", path);
  struct stat info {};
  if (fstat(fd, &info) != 0) {
    const absl::Status failed = Failed("cannot look at", path);
    close(fd);
    return failed;
  }
  return std::make_unique<PosixReadFile>(fd, static_cast<uint64_t>(info.st_size), path);
}

absl::StatusOr<std::unique_ptr<FileLock>> PosixDisk::Lock(const std::string& path) {
  auto lock = std::make_unique<PosixLock>(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, kFileMode));
  if (!lock->fd.ok()) return Failed("cannot open", path);
  if (flock(lock->fd.get(), LOCK_EX | LOCK_NB) == 0) return lock;
  if (errno != EWOULDBLOCK) return Failed("cannot lock", path);
  return absl::UnavailableError(absl::StrCat("'", path, "' is locked by another process"));
}

absl::StatusOr<bool> PosixDisk::IsLocked(const std::string& path) {
  const PosixLock lock(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!lock.fd.ok() && errno == ENOENT) return false;
  if (!lock.fd.ok()) return Failed("cannot open", path);
  if (flock(lock.fd.get(), LOCK_SH | LOCK_NB) == 0) return false;
  if (errno == EWOULDBLOCK) return true;
  return Failed("cannot lock", path);
}

absl::Status PosixDisk::Truncate(const std::string& path, uint64_t bytes) {
  if (truncate(path.c_str(), static_cast<off_t>(bytes)) != 0) return Failed("cannot truncate", path);
  return OpenAndSync(path, O_WRONLY);
}

absl::Status PosixDisk::Remove(const std::string& path) {
  return unlink(path.c_str()) == 0 ? absl::OkStatus() : Failed("cannot remove", path);
}

absl::Status PosixDisk::RemoveDirectory(const std::string& path) {
  return rmdir(path.c_str()) == 0 ? absl::OkStatus() : Failed("cannot remove directory", path);
}

absl::Status PosixDisk::Rename(const std::string& from, const std::string& to) {
  return rename(from.c_str(), to.c_str()) == 0 ? absl::OkStatus() : Failed("cannot rename", from);
}

absl::Status PosixDisk::CreateDirectory(const std::string& path) {
  if (mkdir(path.c_str(), kDirectoryMode) == 0) return absl::OkStatus();
  struct stat info {};
  if (errno == EEXIST && stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) return absl::OkStatus();
  return Failed("cannot create directory", path);
}

absl::Status PosixDisk::SyncDirectory(const std::string& path) { return OpenAndSync(path, O_RDONLY | O_DIRECTORY); }

absl::StatusOr<std::vector<std::string>> PosixDisk::List(const std::string& path) {
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(opendir(path.c_str()), closedir);
  if (directory == nullptr) return Failed("cannot list", path);
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* entry = readdir(directory.get())) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
    errno = 0;
  }
  if (errno != 0) return Failed("cannot list", path);
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace gradwire

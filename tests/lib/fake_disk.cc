// See fake_disk.h.
#include "tests/lib/fake_disk.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"

namespace gradwire::testing_support {
namespace {

constexpr size_t kSectorBytes = 512;

std::string DirectoryOf(const std::string& path) { return path.substr(0, path.rfind('/')); }

absl::Status NoSuch(const std::string& path) {
  return absl::NotFoundError(absl::StrCat("'", path, "' does not exist"));
}

}  // namespace

class FakeDisk::File final : public AppendFile {
 public:
  File(FakeDisk* disk, std::shared_ptr<Content> content)
      : disk_(disk), content_(std::move(content)), power_cycle_(disk->power_cycles_) {}

  absl::Status Append(std::span<const std::span<const uint8_t>> pieces) override {
    std::vector<uint8_t> all;
    for (const auto piece : pieces) all.insert(all.end(), piece.begin(), piece.end());
    const bool was_up = !disk_->crashed_;
    absl::Status status = Begin();
    size_t fits = all.size();
    if (!status.ok()) {
      fits = was_up ? all.size() / 2 : 0;  // the power went in the middle of it
    } else if (!disk_->write_error_.ok()) {
      fits = all.size() / 2;
      status = disk_->write_error_;
    } else if (const uint64_t used = disk_->TotalBytes(); used + all.size() > disk_->capacity_) {
      fits = disk_->capacity_ > used ? disk_->capacity_ - used : 0;
      status = absl::ResourceExhaustedError("no space left on device");
    }
    content_->bytes.insert(content_->bytes.end(), all.begin(), all.begin() + static_cast<ptrdiff_t>(fits));
    return status;
  }

  absl::Status Sync() override {
    GW_RETURN_IF_ERROR(Begin());
    GW_RETURN_IF_ERROR(disk_->sync_error_);
    content_->synced = content_->bytes;
    return absl::OkStatus();
  }

 private:
  absl::Status Begin() {
    if (power_cycle_ != disk_->power_cycles_) return absl::UnavailableError("the file was open when the power went");
    return disk_->Begin();
  }

  FakeDisk* const disk_;
  const std::shared_ptr<Content> content_;
  const uint64_t power_cycle_;
};

class FakeDisk::Reader final : public ReadFile {
 public:
  explicit Reader(std::shared_ptr<Content> content) : content_(std::move(content)) {}
  uint64_t size() const override { return content_->bytes.size(); }
  absl::Status Read(uint64_t offset, std::span<uint8_t> out) override {
    if (offset > size() || out.size() > size() - offset) return absl::OutOfRangeError("the file ends before");
    if (!out.empty()) std::memcpy(out.data(), content_->bytes.data() + offset, out.size());
    return absl::OkStatus();
  }

 private:
  const std::shared_ptr<Content> content_;
};

FakeDisk::FakeDisk() = default;
FakeDisk::~FakeDisk() = default;

absl::Status FakeDisk::Begin() {
  if (!crashed_ && crash_at_ && calls_ >= *crash_at_) crashed_ = true;
  if (crashed_) return absl::UnavailableError("the power is gone");
  ++calls_;
  return absl::OkStatus();
}

void FakeDisk::Edit(const Change& change, Names* names) {
  for (const auto& [path, content] : change.edits) {
    if (content) {
      (*names)[path] = *content;
    } else {
      names->erase(path);
    }
  }
}

void FakeDisk::Apply(Change change) {
  Edit(change, &names_);
  unsynced_.push_back(std::move(change));
}

uint64_t FakeDisk::TotalBytes() const {
  uint64_t bytes = 0;
  for (const auto& [path, content] : names_) bytes += content == nullptr ? 0 : content->bytes.size();
  return bytes;
}

void FakeDisk::PowerCycle(std::mt19937& random) {
  std::map<std::string, bool> lost;  // directories: what follows the first lost change is lost, too
  for (const Change& change : unsynced_) {
    lost[change.directory] = lost[change.directory] || random() % 2 == 0;
    if (!lost[change.directory]) Edit(change, &durable_);
  }
  unsynced_.clear();
  // What lay in a directory that is not there cannot be reached. Parents come before their children.
  for (auto it = durable_.begin(); it != durable_.end();) {
    const std::string parent = DirectoryOf(it->first);
    it = parent.empty() || durable_.contains(parent) ? std::next(it) : durable_.erase(it);
  }
  names_ = durable_;
  for (auto& [path, content] : names_) {
    if (content == nullptr) continue;
    std::vector<uint8_t>& bytes = content->bytes;
    const std::vector<uint8_t>& synced = content->synced;
    if (bytes.size() > synced.size()) bytes.resize(synced.size() + random() % (bytes.size() - synced.size() + 1));
    for (size_t sector = 0; sector < bytes.size(); sector += kSectorBytes) {
      if (random() % 2 == 0) continue;
      const size_t end = std::min(sector + kSectorBytes, bytes.size());
      for (size_t i = std::max(sector, synced.size()); i < end; ++i) bytes[i] = 0;
    }
    content->synced = bytes;
  }
  ProcessDied();
}

void FakeDisk::ProcessDied() {
  crashed_ = false;
  crash_at_.reset();
  calls_ = 0;
  ++power_cycles_;
}

void FakeDisk::FlipBit(const std::string& path, uint64_t bit) {
  names_.at(path)->bytes.at(bit / 8) ^= static_cast<uint8_t>(1u << (bit % 8));
}

uint64_t FakeDisk::SizeOf(const std::string& path) const { return names_.at(path)->bytes.size(); }

std::vector<std::string> FakeDisk::Files() const {
  std::vector<std::string> files;
  for (const auto& [path, content] : names_) {
    if (content != nullptr) files.push_back(path);
  }
  return files;
}

absl::StatusOr<std::unique_ptr<AppendFile>> FakeDisk::Create(const std::string& path) {
  GW_RETURN_IF_ERROR(Begin());
  if (!names_.contains(DirectoryOf(path))) return NoSuch(DirectoryOf(path));
  if (names_.contains(path)) return absl::AlreadyExistsError(absl::StrCat("'", path, "' exists"));
  if (TotalBytes() >= capacity_) return absl::ResourceExhaustedError("no space left on device");
  auto content = std::make_shared<Content>();
  Apply({DirectoryOf(path), {{path, content}}});
  return std::make_unique<File>(this, std::move(content));
}

absl::StatusOr<std::unique_ptr<ReadFile>> FakeDisk::Open(const std::string& path) {
  if (crashed_) return absl::UnavailableError("the power is gone");
  const auto it = names_.find(path);
  if (it == names_.end() || it->second == nullptr) return NoSuch(path);
  return std::make_unique<Reader>(it->second);
}

absl::StatusOr<std::unique_ptr<FileLock>> FakeDisk::Lock(const std::string&) { return std::make_unique<FileLock>(); }

absl::StatusOr<bool> FakeDisk::IsLocked(const std::string&) { return false; }

absl::Status FakeDisk::Truncate(const std::string& path, uint64_t bytes) {
  GW_RETURN_IF_ERROR(Begin());
  const auto it = names_.find(path);
  if (it == names_.end() || it->second == nullptr) return NoSuch(path);
  it->second->bytes.resize(bytes);
  it->second->synced = it->second->bytes;
  return absl::OkStatus();
}

absl::Status FakeDisk::Remove(const std::string& path) {
  GW_RETURN_IF_ERROR(Begin());
  const auto it = names_.find(path);
  if (it == names_.end()) return NoSuch(path);
  if (it->second == nullptr) return absl::FailedPreconditionError(absl::StrCat("'", path, "' is a directory"));
  Apply({DirectoryOf(path), {{path, std::nullopt}}});
  return absl::OkStatus();
}

absl::Status FakeDisk::CheckEmpty(const std::string& path) const {
  const auto inside = names_.lower_bound(path + "/");
  if (inside == names_.end() || !inside->first.starts_with(path + "/")) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("'", path, "' is not empty"));
}

absl::Status FakeDisk::RemoveDirectory(const std::string& path) {
  GW_RETURN_IF_ERROR(Begin());
  if (!names_.contains(path)) return NoSuch(path);
  GW_RETURN_IF_ERROR(CheckEmpty(path));
  Apply({DirectoryOf(path), {{path, std::nullopt}}});
  return absl::OkStatus();
}

absl::Status FakeDisk::Rename(const std::string& from, const std::string& to) {
  GW_RETURN_IF_ERROR(Begin());
  if (!names_.contains(from)) return NoSuch(from);
  GW_RETURN_IF_ERROR(CheckEmpty(to));
  Change change{DirectoryOf(to), {}};
  for (const auto& [path, content] : names_) {
    if (path != from && !path.starts_with(from + "/")) continue;
    change.edits.emplace_back(path, std::nullopt);
    change.edits.emplace_back(to + path.substr(from.size()), content);
  }
  Apply(std::move(change));
  return absl::OkStatus();
}

absl::Status FakeDisk::CreateDirectory(const std::string& path) {
  GW_RETURN_IF_ERROR(Begin());
  if (!names_.contains(path)) Apply({DirectoryOf(path), {{path, std::shared_ptr<Content>()}}});
  return absl::OkStatus();
}

absl::Status FakeDisk::SyncDirectory(const std::string& path) {
  GW_RETURN_IF_ERROR(Begin());
  if (path == failing_directory_ && passing_-- <= 0) GW_RETURN_IF_ERROR(directory_error_);
  for (const Change& change : unsynced_) {
    if (change.directory == path) Edit(change, &durable_);
  }
  std::erase_if(unsynced_, [&](const Change& change) { return change.directory == path; });
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> FakeDisk::List(const std::string& path) {
  if (crashed_) return absl::UnavailableError("the power is gone");
  const auto directory = names_.find(path);
  if (!path.empty() && (directory == names_.end() || directory->second != nullptr)) return NoSuch(path);
  std::vector<std::string> names;
  for (const auto& [name, content] : names_) {
    if (DirectoryOf(name) == path && name != path) names.push_back(name.substr(path.size() + 1));
  }
  return names;
}

}  // namespace gradwire::testing_support

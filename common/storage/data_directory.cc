// See data_directory.h.
#include "common/storage/data_directory.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "common/base/crc32c.h"
#include "common/base/failpoint.h"
#include "common/base/status_macros.h"
#include "common/storage/files.h"

namespace gradwire {
namespace {

constexpr char kRoleFile[] = "ROLE";
constexpr uint64_t kMaxRoleBytes = 4096;
constexpr char kNew[] = ".new";           // behind the suffix: being created
constexpr char kDeleted[] = ".deleted";   // being deleted
constexpr uint32_t kMagic = 0x31535747u;  // "GWS1"
constexpr size_t kHeaderBytes = 8;        // magic, CRC-32C of the rest
constexpr uint64_t kMaxEpochBytes = 64;
constexpr uint64_t kEpochsEnd = uint64_t{1} << 63;  // so that there is always a next one
constexpr uint64_t kMaxJobBytes = 1u << 30;

constexpr std::pair<StoredRole::Kind, const char*> kRoleWords[] = {{StoredRole::Kind::kPrimary, "primary"},
                                                                   {StoredRole::Kind::kStandby, "standby"},
                                                                   {StoredRole::Kind::kFenced, "fenced"}};

std::string ParentOf(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::span<const uint8_t> AsBytes(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

}  // namespace

absl::StatusOr<uint64_t> ReadEpoch(Disk& disk, const std::string& data_directory) {
  const std::string path = absl::StrCat(data_directory, "/", kEpochFile);
  const absl::StatusOr<std::vector<uint8_t>> bytes = ReadWholeFile(disk, path, kMaxEpochBytes);
  if (absl::IsNotFound(bytes.status())) return 0;
  GW_RETURN_IF_ERROR(bytes.status());
  uint64_t epoch = 0;
  if (absl::SimpleAtoi(absl::StripAsciiWhitespace(std::string(bytes->begin(), bytes->end())), &epoch) &&
      epoch < kEpochsEnd) {
    return epoch;
  }
  return absl::DataLossError(absl::StrFormat(
      "'%s' does not hold a number below 2^63: write one there that is larger than every epoch so far", path));
}

absl::StatusOr<v1::StoredJob> ReadStoredJob(Disk& disk, const std::string& directory, const std::string& name) {
  const std::string path = directory + "/" + kJobFile;
  GW_ASSIGN_OR_RETURN(const std::vector<uint8_t> bytes, ReadWholeFile(disk, path, kMaxJobBytes));
  uint32_t magic = 0;
  uint32_t crc = 0;
  if (bytes.size() >= kHeaderBytes) {
    std::memcpy(&magic, bytes.data(), 4);
    std::memcpy(&crc, bytes.data() + 4, 4);
  }
  v1::StoredJob job;
  if (magic != kMagic || crc != Crc32c(std::span(bytes).subspan(kHeaderBytes)) ||
      !job.ParseFromArray(bytes.data() + kHeaderBytes, static_cast<int>(bytes.size() - kHeaderBytes)) ||
      job.spec().name() != name) {
    return absl::DataLossError(absl::StrFormat("'%s' is damaged: restore it from a copy, or delete the job", path));
  }
  return job;
}

absl::StatusOr<std::unique_ptr<DataDirectory>> DataDirectory::Open(Disk* disk, const std::string& path) {
  std::unique_ptr<DataDirectory> directory(new DataDirectory(disk, path));
  const bool is_new = absl::IsNotFound(disk->List(path).status());
  GW_RETURN_IF_ERROR(disk->CreateDirectory(path));
  if (is_new) GW_RETURN_IF_ERROR(disk->SyncDirectory(ParentOf(path)));
  absl::StatusOr<std::unique_ptr<FileLock>> lock = disk->Lock(path + "/" + kLockFile);
  if (absl::IsUnavailable(lock.status())) {
    return absl::UnavailableError(absl::StrFormat(
        "data directory '%s' is in use by another gradwire-server: stop it, or give each server its own", path));
  }
  GW_RETURN_IF_ERROR(lock.status());
  directory->lock_ = *std::move(lock);
  GW_RETURN_IF_ERROR(directory->NextEpoch());
  GW_RETURN_IF_ERROR(directory->ReadRole());
  GW_RETURN_IF_ERROR(disk->CreateDirectory(directory->jobs_));
  GW_RETURN_IF_ERROR(disk->SyncDirectory(path));
  GW_RETURN_IF_ERROR(directory->RemoveLeftovers());
  // A server that was killed may have left names that only the system's memory holds.
  GW_RETURN_IF_ERROR(disk->SyncDirectory(directory->jobs_));
  return directory;
}

absl::Status DataDirectory::NextEpoch() {
  GW_ASSIGN_OR_RETURN(const uint64_t last, ReadEpoch(*disk_, path_));
  return RaiseEpoch(last + 1);
}

absl::Status DataDirectory::RaiseEpoch(uint64_t epoch) {
  GW_FAILPOINT("epoch.before_write");
  GW_RETURN_IF_ERROR(WriteFileAtomically(*disk_, path_, kEpochFile, AsBytes(absl::StrCat(epoch, "\n"))));
  GW_FAILPOINT("epoch.after_write");
  epoch_ = epoch;
  return absl::OkStatus();
}

absl::Status DataDirectory::ReadRole() {
  const std::string path = absl::StrCat(path_, "/", kRoleFile);
  const absl::StatusOr<std::vector<uint8_t>> bytes = ReadWholeFile(*disk_, path, kMaxRoleBytes);
  if (absl::IsNotFound(bytes.status())) return absl::OkStatus();
  GW_RETURN_IF_ERROR(bytes.status());
  const std::vector<std::string> words =
      absl::StrSplit(std::string(bytes->begin(), bytes->end()), absl::ByAnyChar(" \n"), absl::SkipEmpty());
  for (const auto& [kind, word] : kRoleWords) {
    if (words.size() < 2 || words[0] != word || !absl::SimpleAtoi(words[1], &role_.epoch)) continue;
    role_.kind = kind;
    role_.name = words.size() > 2 ? words[2] : "";
    return absl::OkStatus();
  }
  return absl::DataLossError(absl::StrFormat(
      "'%s' does not say what this server was: write `primary 0`, `standby 0` or `fenced 0` there", path));
}

absl::Status DataDirectory::SetRole(StoredRole role) {
  std::string text;
  for (const auto& [kind, word] : kRoleWords) {
    if (kind == role.kind) text = absl::StrCat(word, " ", role.epoch, " ", role.name, "\n");
  }
  GW_RETURN_IF_ERROR(WriteFileAtomically(*disk_, path_, kRoleFile, AsBytes(text)));
  role_ = std::move(role);
  return absl::OkStatus();
}

absl::Status DataDirectory::RemoveLeftovers() {
  GW_ASSIGN_OR_RETURN(const std::vector<std::string> names, disk_->List(jobs_));
  for (const std::string& name : names) {
    if (!name.ends_with(absl::StrCat(kJobSuffix, kNew)) && !name.ends_with(absl::StrCat(kJobSuffix, kDeleted)))
      continue;
    GW_RETURN_IF_ERROR(RemoveTree(*disk_, jobs_ + "/" + name));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> DataDirectory::Jobs() const {
  GW_ASSIGN_OR_RETURN(const std::vector<std::string> names, disk_->List(jobs_));
  std::vector<std::string> jobs;
  for (const std::string& name : names) {
    if (name.ends_with(kJobSuffix)) jobs.push_back(name.substr(0, name.size() - std::strlen(kJobSuffix)));
  }
  return jobs;
}

absl::Status DataDirectory::CreateJob(const v1::StoredJob& job, const Fill& fill) {
  const std::string& name = job.spec().name();
  const std::string path = JobPath(name);
  GW_ASSIGN_OR_RETURN(const std::vector<std::string> names, disk_->List(jobs_));
  if (std::find(names.begin(), names.end(), name + kJobSuffix) != names.end()) {
    return absl::AlreadyExistsError(absl::StrFormat("'%s' exists", path));
  }
  const std::string made = path + kNew;
  GW_RETURN_IF_ERROR(RemoveTree(*disk_, made));  // of an attempt that failed
  std::string bytes(kHeaderBytes, '\0');
  bytes += job.SerializeAsString();
  const uint32_t crc = Crc32c(AsBytes(bytes).subspan(kHeaderBytes));
  std::memcpy(bytes.data(), &kMagic, 4);
  std::memcpy(bytes.data() + 4, &crc, 4);
  absl::Status status = disk_->CreateDirectory(made);
  if (status.ok()) status = disk_->CreateDirectory(made + "/" + kJournal);
  if (status.ok()) status = WriteFileAtomically(*disk_, made, kJobFile, AsBytes(bytes));
  if (status.ok() && fill != nullptr) status = fill(made);
  GW_FAILPOINT("job.before_rename");
  if (status.ok()) status = disk_->Rename(made, path);
  GW_FAILPOINT("job.after_rename");
  if (status.ok()) return disk_->SyncDirectory(jobs_);
  RemoveTree(*disk_, made).IgnoreError();  // gives the room back; otherwise the next start does
  return status;
}

absl::Status DataDirectory::RemoveJob(const std::string& name) {
  const std::string path = JobPath(name);
  const absl::Status renamed = disk_->Rename(path, path + kDeleted);
  if (absl::IsNotFound(renamed)) return absl::OkStatus();
  GW_RETURN_IF_ERROR(renamed);
  GW_RETURN_IF_ERROR(disk_->SyncDirectory(jobs_));
  return RemoveTree(*disk_, path + kDeleted);
}

}  // namespace gradwire

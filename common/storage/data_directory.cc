// See data_directory.h.
#include "common/storage/data_directory.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "common/base/crc32c.h"
#include "common/base/failpoint.h"
#include "common/base/names.h"
#include "common/base/status_macros.h"
#include "common/storage/files.h"

namespace gradwire {
namespace {

constexpr char kRoleFile[] = "ROLE";
constexpr char kLineageFile[] = "LINEAGE";
constexpr uint64_t kMaxRoleBytes = 4096;
constexpr uint64_t kMaxLineageBytes = 64;
static_assert(kMaxServerNameBytes + 64 < kMaxRoleBytes, "a role that is written is read");
constexpr char kNew[] = ".new";           // behind the suffix: being created
constexpr char kDeleted[] = ".deleted";   // being deleted
constexpr uint32_t kMagic = 0x31535747u;  // "GWS1"
constexpr size_t kHeaderBytes = 8;        // magic, CRC-32C of the rest
constexpr uint64_t kMaxEpochBytes = 64;
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

// None where there is no such file. One that is longer than what is written there is cut, and not what is meant by it.
absl::StatusOr<std::optional<std::string>> ReadSmallText(Disk& disk, const std::string& path, uint64_t limit_bytes) {
  const absl::StatusOr<std::vector<uint8_t>> bytes = ReadWholeFile(disk, path, limit_bytes);
  if (absl::IsNotFound(bytes.status())) return std::nullopt;
  if (absl::IsResourceExhausted(bytes.status())) return std::string();
  GW_RETURN_IF_ERROR(bytes.status());
  return std::string(bytes->begin(), bytes->end());
}

}  // namespace

absl::StatusOr<uint64_t> ReadEpoch(Disk& disk, const std::string& data_directory) {
  const std::string path = absl::StrCat(data_directory, "/", kEpochFile);
  GW_ASSIGN_OR_RETURN(const std::optional<std::string> text, ReadSmallText(disk, path, kMaxEpochBytes));
  if (!text) return 0;
  uint64_t epoch = 0;
  // The last one has no next one, which a start needs.
  if (absl::SimpleAtoi(absl::StripAsciiWhitespace(*text), &epoch) && epoch < kEpochsEnd - 1) return epoch;
  return absl::DataLossError(absl::StrFormat(
      "'%s' does not hold a number below 2^63 - 1: write one there that is larger than every epoch so far", path));
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
  GW_RETURN_IF_ERROR(directory->ReadLineage());
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
  if (epoch >= kEpochsEnd) {
    return absl::InvalidArgumentError(absl::StrFormat("epoch %d is not below 2^63: it is not taken", epoch));
  }
  GW_FAILPOINT("epoch.before_write");
  GW_RETURN_IF_ERROR(WriteFileAtomically(*disk_, path_, kEpochFile, AsBytes(absl::StrCat(epoch, "\n"))));
  GW_FAILPOINT("epoch.after_write");
  epoch_ = epoch;
  return absl::OkStatus();
}

absl::Status DataDirectory::ReadRole() {
  const std::string path = absl::StrCat(path_, "/", kRoleFile);
  GW_ASSIGN_OR_RETURN(const std::optional<std::string> text, ReadSmallText(*disk_, path, kMaxRoleBytes));
  if (!text) return absl::OkStatus();
  const std::vector<std::string> words = absl::StrSplit(*text, absl::ByAnyChar(" \n"), absl::SkipEmpty());
  for (const auto& [kind, word] : kRoleWords) {
    uint64_t epoch = 0;
    if (words.size() < 2 || words[0] != word || !absl::SimpleAtoi(words[1], &epoch) || epoch >= kEpochsEnd) continue;
    if (words.size() > 2 && !IsServerName(words[2])) continue;
    role_ = {kind, epoch, words.size() > 2 ? words[2] : ""};
    return absl::OkStatus();
  }
  return absl::DataLossError(absl::StrFormat(
      "'%s' does not say what this server was: write `primary 0`, `standby 0` or `fenced 0` there", path));
}

absl::Status DataDirectory::SetRole(StoredRole role) {
  if (role.epoch >= kEpochsEnd) {
    return absl::InvalidArgumentError(absl::StrFormat("the role's epoch %d is not below 2^63", role.epoch));
  }
  if (!role.name.empty()) GW_RETURN_IF_ERROR(CheckServerName("the role's server", role.name));
  std::string text;
  for (const auto& [kind, word] : kRoleWords) {
    if (kind == role.kind) text = absl::StrCat(word, " ", role.epoch, " ", role.name, "\n");
  }
  GW_RETURN_IF_ERROR(WriteFileAtomically(*disk_, path_, kRoleFile, AsBytes(text)));
  role_ = std::move(role);
  return absl::OkStatus();
}

absl::Status DataDirectory::ReadLineage() {
  const std::string path = absl::StrCat(path_, "/", kLineageFile);
  GW_ASSIGN_OR_RETURN(const std::optional<std::string> text, ReadSmallText(*disk_, path, kMaxLineageBytes));
  if (!text) return absl::OkStatus();
  const absl::StatusOr<Lineage> read = Lineage::Parse(std::string(absl::StripAsciiWhitespace(*text)));
  if (!read.ok()) {
    return absl::DataLossError(
        absl::StrFormat("'%s' does not hold the 32 hexadecimal digits of a lineage: copy the file from this server's "
                        "standby or primary, "
                        "which have the same; or remove it, and start those anew with empty data directories",
                        path));
  }
  lineage_ = *read;
  return absl::OkStatus();
}

absl::Status DataDirectory::SetLineage(Lineage lineage) {
  GW_RETURN_IF_ERROR(WriteFileAtomically(*disk_, path_, kLineageFile, AsBytes(absl::StrCat(lineage.Hex(), "\n"))));
  lineage_ = std::move(lineage);
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
  if (status.ok()) {
    status = disk_->SyncDirectory(jobs_);
    if (!status.ok()) RemoveJob(name).IgnoreError();  // a start after a loss of power might find it, or not
    return status;
  }
  RemoveTree(*disk_, made).IgnoreError();  // gives the room back; otherwise the next start does
  return status;
}

absl::Status DataDirectory::RemoveJob(const std::string& name) {
  const std::string path = JobPath(name);
  const std::string deleted = path + kDeleted;
  const auto remove_deleted = [&]() -> absl::Status {
    GW_RETURN_IF_ERROR(disk_->SyncDirectory(jobs_));
    return RemoveTree(*disk_, deleted);
  };
  if (disk_->List(deleted).ok()) GW_RETURN_IF_ERROR(remove_deleted());  // of an attempt that failed
  const absl::Status renamed = disk_->Rename(path, deleted);
  if (absl::IsNotFound(renamed)) return absl::OkStatus();
  GW_RETURN_IF_ERROR(renamed);
  return remove_deleted();
}

}  // namespace gradwire

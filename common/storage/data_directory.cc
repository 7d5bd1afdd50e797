// See data_directory.h.
#include "common/storage/data_directory.h"

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

constexpr char kEpochFile[] = "EPOCH";
constexpr char kRoleFile[] = "ROLE";
constexpr uint64_t kMaxRoleBytes = 4096;
constexpr char kSuffix[] = ".job";
constexpr char kNew[] = ".new";           // behind the suffix: being created
constexpr char kDeleted[] = ".deleted";   // being deleted
constexpr uint32_t kMagic = 0x31535747u;  // "GWS1"
constexpr size_t kHeaderBytes = 8;        // magic, CRC-32C of the rest
constexpr uint64_t kMaxEpochBytes = 64;
constexpr uint64_t kMaxJobBytes = 1u << 30;

constexpr std::pair<StoredRole::Kind, const char*> kRoleWords[] = {{StoredRole::Kind::kPrimary, "primary"},
                                                                   {StoredRole::Kind::kStandby, "standby"},
                                                                   {StoredRole::Kind::kFenced, "fenced"}};

std::span<const uint8_t> AsBytes(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

}  // namespace

absl::StatusOr<std::unique_ptr<DataDirectory>> DataDirectory::Open(Disk* disk, const std::string& path) {
  std::unique_ptr<DataDirectory> directory(new DataDirectory(disk, path));
  GW_RETURN_IF_ERROR(disk->CreateDirectory(path));
  absl::StatusOr<std::unique_ptr<FileLock>> lock = disk->Lock(path + "/LOCK");
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
  return directory;
}

absl::Status DataDirectory::NextEpoch() {
  const std::string path = absl::StrCat(path_, "/", kEpochFile);
  const absl::StatusOr<std::vector<uint8_t>> bytes = ReadWholeFile(*disk_, path, kMaxEpochBytes);
  uint64_t last = 0;
  if (bytes.ok()) {
    const std::string text(bytes->begin(), bytes->end());
    if (!absl::SimpleAtoi(absl::StripAsciiWhitespace(text), &last)) {
      return absl::DataLossError(
          absl::StrFormat("'%s' does not hold a number: write one there that is larger than every epoch so far", path));
    }
  } else if (!absl::IsNotFound(bytes.status())) {
    return bytes.status();
  }
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
    if (!name.ends_with(absl::StrCat(kSuffix, kNew)) && !name.ends_with(absl::StrCat(kSuffix, kDeleted))) continue;
    GW_RETURN_IF_ERROR(RemoveTree(*disk_, jobs_ + "/" + name));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> DataDirectory::Jobs() const {
  GW_ASSIGN_OR_RETURN(const std::vector<std::string> names, disk_->List(jobs_));
  std::vector<std::string> jobs;
  for (const std::string& name : names) {
    if (name.ends_with(kSuffix)) jobs.push_back(name.substr(0, name.size() - std::strlen(kSuffix)));
  }
  return jobs;
}

absl::Status DataDirectory::CreateJob(const v1::StoredJob& job) {
  const std::string& name = job.spec().name();
  const std::string path = JobPath(name);
  const std::string made = path + kNew;
  GW_RETURN_IF_ERROR(RemoveTree(*disk_, made));  // of an attempt that failed
  GW_RETURN_IF_ERROR(disk_->CreateDirectory(made));
  GW_RETURN_IF_ERROR(disk_->CreateDirectory(made + "/journal"));
  std::string bytes(kHeaderBytes, '\0');
  bytes += job.SerializeAsString();
  const uint32_t crc = Crc32c(AsBytes(bytes).subspan(kHeaderBytes));
  std::memcpy(bytes.data(), &kMagic, 4);
  std::memcpy(bytes.data() + 4, &crc, 4);
  GW_RETURN_IF_ERROR(WriteFileAtomically(*disk_, made, "job", AsBytes(bytes)));
  GW_FAILPOINT("job.before_rename");
  GW_RETURN_IF_ERROR(disk_->Rename(made, path));
  GW_FAILPOINT("job.after_rename");
  return disk_->SyncDirectory(jobs_);
}

absl::StatusOr<v1::StoredJob> DataDirectory::LoadJob(const std::string& name) const {
  const std::string path = JobPath(name) + "/job";
  GW_ASSIGN_OR_RETURN(const std::vector<uint8_t> bytes, ReadWholeFile(*disk_, path, kMaxJobBytes));
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

absl::Status DataDirectory::RemoveJob(const std::string& name) {
  const std::string path = JobPath(name);
  const absl::Status renamed = disk_->Rename(path, path + kDeleted);
  if (absl::IsNotFound(renamed)) return absl::OkStatus();
  GW_RETURN_IF_ERROR(renamed);
  GW_RETURN_IF_ERROR(disk_->SyncDirectory(jobs_));
  return RemoveTree(*disk_, path + kDeleted);
}

}  // namespace gradwire

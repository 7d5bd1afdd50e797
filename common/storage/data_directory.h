// The directory of --data-dir: whose it is, how often a server started in it, and the jobs in it.
//
//   LOCK                    locked by the server that runs
//   EPOCH                   decimal; grows with every start and promotion (proto/REPLICATION.md)
//   ROLE                    what the server of this directory was (proto/REPLICATION.md); absent: a primary, or nothing
//   LINEAGE                 the key of its lineage (proto/REPLICATION.md); absent: it served and followed nobody yet
//   jobs/NAME.job/job       the job (gradwire.v1.StoredJob behind a checksum)
//   jobs/NAME.job/journal/  segments, proto/JOURNAL.md
//   jobs/NAME.job/snapshots/VERSION/  proto/SNAPSHOT.md
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/storage/disk.h"
#include "common/storage/lineage.h"
#include "gradwire/v1/storage.pb.h"

namespace gradwire {

// The parts of a data directory, for those who look at one without running in it.
inline constexpr char kLockFile[] = "LOCK";
inline constexpr char kEpochFile[] = "EPOCH";
inline constexpr char kJobs[] = "jobs";
inline constexpr char kJobSuffix[] = ".job";
inline constexpr char kJobFile[] = "job";
inline constexpr char kJournal[] = "journal";
inline constexpr char kSnapshots[] = "snapshots";
// Every epoch is smaller, in memory as in EPOCH and ROLE.
inline constexpr uint64_t kEpochsEnd = uint64_t{1} << 63;
// Of the last server that started there; 0: none did. DataLoss where the file holds no number.
absl::StatusOr<uint64_t> ReadEpoch(Disk& disk, const std::string& data_directory);
// `directory`: of the job. DataLoss where the file is damaged.
absl::StatusOr<v1::StoredJob> ReadStoredJob(Disk& disk, const std::string& directory, const std::string& name);

// What the server of a data directory was.
struct StoredRole {
  enum class Kind { kNone, kPrimary, kStandby, kFenced };
  Kind kind = Kind::kNone;
  uint64_t epoch = 0;  // the largest epoch of another server that it knows of
  std::string name;    // of that server; a server's name (common/base/names.h) or empty
};

// Thread-safe for different jobs.
class DataDirectory {
 public:
  // Makes what is missing, takes the lock and a new epoch, removes what an interrupted creation or deletion left.
  // `disk` outlives the result. Errors: Unavailable (another server runs in it), DataLoss (EPOCH, ROLE or LINEAGE
  // cannot be read; says what to do), those of the disk.
  static absl::StatusOr<std::unique_ptr<DataDirectory>> Open(Disk* disk, const std::string& path);

  Disk& disk() const { return *disk_; }
  const std::string& path() const { return path_; }
  // Larger than that of every server that ran here before.
  uint64_t epoch() const { return epoch_; }
  // On disk when it returns ok; the next server that starts here has a larger one. InvalidArgument from kEpochsEnd on.
  absl::Status RaiseEpoch(uint64_t epoch);
  const StoredRole& role() const { return role_; }
  // InvalidArgument where it could not be read again: nothing is written then.
  absl::Status SetRole(StoredRole role);
  const Lineage& lineage() const { return lineage_; }
  // On disk when it returns ok.
  absl::Status SetLineage(Lineage lineage);

  // Names of the jobs, sorted.
  absl::StatusOr<std::vector<std::string>> Jobs() const;
  // All of it is on disk when it returns ok; otherwise nothing of it counts. `fill` may write more into the job's
  // directory, whose path it gets, before it counts. AlreadyExists where the job is there.
  using Fill = std::function<absl::Status(const std::string&)>;
  absl::Status CreateJob(const v1::StoredJob& job, const Fill& fill = nullptr);
  // DataLoss where the file is damaged.
  absl::StatusOr<v1::StoredJob> LoadJob(const std::string& name) const {
    return ReadStoredJob(*disk_, JobPath(name), name);
  }
  // Ok where there is none.
  absl::Status RemoveJob(const std::string& name);
  std::string SnapshotsOf(const std::string& name) const { return JobPath(name) + "/" + kSnapshots; }
  std::string JournalOf(const std::string& name) const { return JobPath(name) + "/" + kJournal; }

 private:
  DataDirectory(Disk* disk, std::string path) : disk_(disk), path_(std::move(path)), jobs_(path_ + "/" + kJobs) {}
  std::string JobPath(const std::string& name) const { return jobs_ + "/" + name + kJobSuffix; }
  absl::Status NextEpoch();
  absl::Status ReadRole();
  absl::Status ReadLineage();
  absl::Status RemoveLeftovers();

  Disk* const disk_;
  const std::string path_;
  const std::string jobs_;
  std::unique_ptr<FileLock> lock_;
  std::atomic<uint64_t> epoch_{0};
  // Of whoever changes them.
  StoredRole role_;
  Lineage lineage_;
};

}  // namespace gradwire

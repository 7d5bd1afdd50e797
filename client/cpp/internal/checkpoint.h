// What one worker of a job keeps beside the job itself, as a file: written between two rounds, so that a process that
// is started anew goes on as if it had never ended. The bytes: proto/CHECKPOINT.md.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/include/gradwire/session.h"
#include "client/cpp/internal/gradients.h"
#include "client/cpp/internal/replica.h"
#include "common/codec/plan/plan_window.h"
#include "common/job/job.h"
#include "common/job/layout.h"
#include "common/snapshot/safetensors.h"
#include "common/storage/disk.h"

namespace gradwire::client {

// Who wrote it, and where it stood.
struct CheckpointIdentity {
  std::string worker;
  uint64_t incarnation = 0;
  uint64_t version = 0;  // of the replica: the round that comes next
  PullMode pull = PullMode::kUpdate;
  // Of the shards that the worker spoke to. A lineage of 0 is not known: files of before have none.
  std::vector<uint64_t> server_epochs;
  std::vector<uint64_t> server_lineages;
  // What the training loop keeps beside it, by name.
  std::map<std::string, std::string> notes;
  // Of the job on each shard (JoinReply.instance). Not written where no shard has told one; files of before have none.
  std::vector<uint64_t> job_instances = {};
};

// Writes beside, syncs, renames: at `path` there is always a whole checkpoint, this one or the one before. `plans`: up
// to the version, of Layout::slices(). Errors: InvalidArgument (notes that are not UTF-8, or of more than 1
// MiB together: nothing is written); those of the disk, and nothing stays beside.
absl::Status WriteCheckpoint(Disk& disk, const std::string& path, const Job& job, const Layout& layout,
                             const CheckpointIdentity& identity, const Replica& replica, const GradientStore& gradients,
                             std::span<const PlanWindow> plans);

// A checkpoint in memory: checked as a whole, and against the job. Borrows the job.
class CheckpointFile {
 public:
  // Errors: NotFound; InvalidArgument (no checkpoint, or of another format version); DataLoss (damaged);
  // FailedPrecondition (of another job, shard map, worker or pull mode: says which).
  static absl::StatusOr<CheckpointFile> Read(Disk& disk, const std::string& path, const Job& job, const Layout& layout,
                                             const std::string& worker, PullMode pull);

  // The same of a file that another job is to begin with: of any name, worker, shard map and pull mode but "mean",
  // which has no parameters. FailedPrecondition: it is of other tensors.
  static absl::StatusOr<CheckpointFile> ReadForNewJob(Disk& disk, const std::string& path, const Job& job);
  // Parameters; and residuals and the preconditioner's state where the jobs differ in nothing but the name.
  absl::Status RestoreForNewJob(Replica* replica, GradientStore* gradients) const;
  std::string DescribeForNewJob() const;

  const CheckpointIdentity& identity() const { return identity_; }
  const std::vector<PlanWindow>& plans() const { return plans_; }
  // Parameters and moments into the replica; residuals and the preconditioner's state into the gradients. DataLoss
  // where something is missing.
  absl::Status Restore(Replica* replica, GradientStore* gradients) const;

 private:
  CheckpointFile(std::string path, const Job* job) : path_(std::move(path)), job_(job) {}
  static absl::StatusOr<CheckpointFile> ReadChecked(Disk& disk, const std::string& path, const Job& job);
  absl::Status ParseIdentity();
  // Of as many numbers in hexadecimal digits as there are; false where one is none.
  bool ParseList(const std::string& key, std::vector<uint64_t>* numbers) const;
  absl::Status CheckDigest() const;
  absl::Status CheckSame(const Layout& layout, const std::string& worker, PullMode pull) const;
  absl::Status ParsePlans(const Layout& layout);
  absl::Status Damaged(const std::string& what) const;
  std::string Metadata(const std::string& key) const;
  // The job that wrote it differs from this one in nothing but its name.
  bool SameButName() const;
  // The tensor `name`; InvalidArgument where there is none of this type and size.
  absl::StatusOr<std::span<const uint8_t>> Find(const std::string& name, TensorType type, uint64_t bytes) const;
  // Fills `values`, in `memory`, from "KIND/NAME OF THE TENSOR".
  absl::Status Fill(const std::string& kind, uint32_t tensor, TensorMemory* memory, std::span<float> values) const;
  bool Has(const std::string& kind, uint32_t tensor) const;
  absl::Status RestoreGradients(TensorMemory* memory, GradientStore* gradients) const;

  std::string path_;
  const Job* job_;
  std::vector<uint8_t> bytes_;
  SafetensorsHeader header_;
  CheckpointIdentity identity_;
  std::vector<PlanWindow> plans_;
};

}  // namespace gradwire::client

// The SHA-256 of a job's parameters: work of seconds that anybody may ask for, so it takes a share of the time of one
// core, whoever asks and however often.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/job/job_parts.h"

namespace gradwire {

// Thread-safe.
class ParameterDigest {
 public:
  explicit ParameterDigest(JobParts* parts) : parts_(*parts) {}

  // The digest in hex, empty where the job keeps no parameters; of some moment between the call and its return.
  // Computed once for all who wait for it, and not again while nothing changes, in a bounded share of one core's time
  // for all jobs of the server. ResourceExhausted: too many wait already. Cancelled, or the reason for which the job
  // was shut.
  absl::StatusOr<std::string> Get();

 private:
  absl::StatusOr<std::string> Compute(std::vector<uint64_t>* versions);
  std::vector<uint64_t> Versions() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  JobParts& parts_;

  absl::Mutex mu_;  // before those of the job
  uint64_t asked_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t answered_ ABSL_GUARDED_BY(mu_) = 0;  // `asked_` when the last digest was begun
  bool computing_ ABSL_GUARDED_BY(mu_) = false;
  size_t waiters_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<uint64_t> versions_ ABSL_GUARDED_BY(mu_);  // by bucket
  absl::StatusOr<std::string> digest_ ABSL_GUARDED_BY(mu_) = "";
};

}  // namespace gradwire

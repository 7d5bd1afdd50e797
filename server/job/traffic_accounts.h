// What has passed through a job on this server, for its status: bytes by kind, frames that were refused or came too
// late, and each worker's part.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/codec/codec.h"
#include "gradwire/v1/operator.pb.h"
#include "server/rounds/membership.h"

namespace gradwire {

// Thread-safe; its mutex is innermost. A worker's counts go with the worker, the job's counts stay.
class TrafficAccounts {
 public:
  void NoteUpload(uint64_t bytes) { upload_bytes_ += bytes; }
  void NotePush(uint64_t bytes) { push_bytes_ += bytes; }
  void NoteUpdatePulled(uint64_t bytes) { pull_bytes_ += bytes; }
  void NoteParametersPulled(uint64_t bytes) { parameter_bytes_ += bytes; }
  void NoteRefused() { ++refused_frames_; }
  // A round was applied.
  void NoteUpdate(const FinishStats& stats);
  // What was deferred in rounds that were only replayed does not count.
  void ForgetReplayed() { deferred_elements_ = 0; }

  // A worker counts from Open to Close. NoteFrame opens; the other functions ignore workers that are not open.
  void Open(MemberId member);
  void Close(MemberId member);
  void NoteChunk(MemberId member, uint64_t bytes);
  void NoteFrame(MemberId member);
  void NoteNotIncluded(MemberId member);
  // `elements`: a total that the worker told; a smaller one than before is ignored.
  void NoteSanitized(MemberId member, uint64_t elements);

  void Describe(v1::JobStatus* status) const;
  void DescribeWorker(MemberId member, v1::WorkerStatus* status) const;
  size_t workers() const;

 private:
  struct Worker {
    uint64_t frames = 0;
    uint64_t not_included_frames = 0;
    uint64_t bytes = 0;
    uint64_t sanitized_elements = 0;
  };

  std::atomic<uint64_t> push_bytes_{0};
  std::atomic<uint64_t> pull_bytes_{0};
  std::atomic<uint64_t> upload_bytes_{0};
  std::atomic<uint64_t> parameter_bytes_{0};
  std::atomic<uint64_t> deferred_elements_{0};
  std::atomic<uint64_t> update_elements_{0};
  std::atomic<uint64_t> refused_frames_{0};
  std::atomic<uint64_t> not_included_frames_{0};

  mutable absl::Mutex mu_;
  std::map<MemberId, Worker> workers_ ABSL_GUARDED_BY(mu_);
  uint64_t sanitized_elements_ ABSL_GUARDED_BY(mu_) = 0;  // of all workers so far
};

}  // namespace gradwire

// The initial parameters of a job: one worker, whom the rounds choose, uploads them bucket by bucket.
//
//   Take, chunk by chunk -> the bucket's store -> record -> (safe) acknowledgement; with the last bucket version 0 is
//   there, and whoever waits for it is answered
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/bytes.h"
#include "common/wire/frame.h"
#include "server/desk/desk.h"
#include "server/flow/push_stream.h"
#include "server/job/job_log.h"
#include "server/job/job_parts.h"

namespace gradwire {

// Thread-safe. An upload that is under way is in BucketState::upload.
class InitialUpload {
 public:
  // The verdict to acknowledge now; none where more is to come, or the acknowledgement goes out when the record is
  // safe. An error is a refusal.
  using Taken = absl::StatusOr<std::optional<PushVerdict>>;

  InitialUpload(JobParts* parts, JobLog* log, Desk* desk) : parts_(*parts), log_(*log), desk_(*desk) {}

  // A chunk of a bucket's parameters, which may be here already and sent again.
  Taken Take(PushStream& stream, const wire::Chunk& chunk, std::span<const Bytes> received);
  // A bucket's parameters were sent again, whole; `digest`: over their chunks.
  Taken Repeat(const PushStream& stream, uint32_t bucket, uint32_t digest);
  // The stream has closed: drops what it left unfinished in the bucket.
  void Abandon(BucketState& bucket, const PushStream& stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);

 private:
  // Keeps the chunk, within what the bucket's parameters may take.
  absl::Status Keep(BucketState& bucket, const wire::Chunk& chunk, std::span<const Bytes> received)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  // The bucket's last chunk has come: `chunks` are its parameters. *record: for the journal.
  absl::Status Complete(BucketState& bucket, const PushStream& stream, std::vector<Bytes> chunks,
                        journal::Record* record, RoundActions* actions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  // Moves the kept chunks out.
  std::vector<Bytes> TakeKept(BucketState& bucket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  // The record of a bucket may be seen: acknowledges its upload. With the last bucket version 0 is there.
  void NoteSafe(uint32_t bucket);

  JobParts& parts_;
  JobLog& log_;
  Desk& desk_;
  int unsafe_ ABSL_GUARDED_BY(parts_.mu) = 0;  // buckets whose records may not be seen yet
};

}  // namespace gradwire

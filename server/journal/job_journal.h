// The journal of a job in a data directory: what a shard is recovered from and writes to.
#pragma once

#include "absl/status/status.h"
#include "common/base/clock.h"
#include "common/storage/data_directory.h"
#include "server/job/job_shard.h"

namespace gradwire {

// Replays what there is into `shard`, which is new and was made from a job of `data`, and gives it a running journal to
// go on with, in segments of about `segment_bytes`. Returns when the shard may be joined. `data` and `clock` outlive
// the shard. Errors: those of ReadJournal and JobShard::Recover; the shard is of no use then.
absl::Status OpenJournal(DataDirectory& data, JobShard& shard, Clock* clock, uint64_t segment_bytes);

}  // namespace gradwire

// The journal of a job in a data directory: what a shard is recovered from and writes to.
#pragma once

#include "absl/status/statusor.h"
#include "common/base/clock.h"
#include "common/storage/data_directory.h"
#include "server/job/job_shard.h"
#include "server/replication/replicated_sink.h"

namespace gradwire {

struct JournalUse {
  bool following = false;      // the shard is a standby's: its end stays open (Recovery::End)
  uint64_t segment_bytes = 0;  // about as long as this a segment gets
  ReplicationHooks replication;
  decltype(JobEnvironment::adopt_journal) adopt{};
  bool may_raise_epoch =
      false;  // nobody was told this server's epoch: where the journal's is larger, it is made larger
};

// Replays what there is into `shard`, which is new and was made from a job of `data`, and gives it a running journal to
// go on with, behind the sink that standbys hang on to; the shard owns it. Returns when the shard may be joined or may
// follow. `data` and `clock` outlive the shard. Errors: those of ReadJournal and Recovery::Recover; FailedPrecondition
// (the journal is of a later epoch than the directory); the shard is of no use then.
absl::StatusOr<ReplicatedSink*> OpenJournal(DataDirectory& data, JobShard& shard, Clock* clock, const JournalUse& use);

}  // namespace gradwire

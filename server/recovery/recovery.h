// How a shard comes back: a snapshot and the records behind it, replayed through the same stores and the same Apply as
// in rounds. A standby is a shard whose recovery goes on, record by record, until it is promoted.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "common/journal/record.h"
#include "common/snapshot/shard_state.h"
#include "server/job/copy_position.h"
#include "server/job/job_log.h"
#include "server/job/job_parts.h"
#include "server/job/past_rounds.h"
#include "server/recovery/replay_state.h"
#include "server/snapshot/snapshots.h"
#include "server/stages/stages.h"

namespace gradwire {

// Of one thread at a time, until anybody joins.
class Recovery {
 public:
  using RecordVisitor = std::function<absl::Status(journal::Record)>;
  using ReadRecords = std::function<absl::Status(const RecordVisitor&)>;

  Recovery(JobParts* parts, Flow* flow, PastRounds* past, Snapshots* snapshots, JobLog* log, Stages* stages)
      : parts_(*parts), flow_(*flow), past_(*past), snapshots_(*snapshots), log_(*log), stages_(*stages) {}

  // Brings a new shard to where its journal ends, before anybody joins: `read` hands the records to its argument, in
  // order. `snapshot`: what the journal goes on from, may be null; records of its rounds are looked at for what workers
  // may ask for again. Errors: those of `read`; DataLoss (records do not follow each other); those of decoding.
  absl::Status Recover(const ShardState* snapshot, const ReadRecords& read);
  // The two parts of Recover. Between them the shard is a standby's: nobody joins, Follow brings it further.
  absl::Status Begin(const ShardState* snapshot, const ReadRecords& read);
  absl::Status End();
  // Applies the next record of the primary, then hands it to the log, whose `visible` is `safe`. By one thread at a
  // time, not together with End. Errors as of Recover: nothing more can follow then.
  absl::Status Follow(journal::Record record, std::function<void()> safe);
  // Of a standby's shard, by the thread that calls Follow: how far each bucket is. Empty where that cannot be told: a
  // bucket has no update yet.
  std::vector<CopyPosition> Positions();
  // That Begin came to; 0 where nothing was recovered. Constant once anybody joins.
  uint64_t version() const { return version_; }

 private:
  void Load(const ShardState& snapshot);
  absl::Status Replay(const journal::Record& record);
  absl::Status ReplayInitial(const journal::Record& record);
  absl::Status ReplayUpdate(const journal::Record& record);
  absl::Status ReplayOwed(const journal::Record& record);
  absl::Status ReplayWhole(const journal::Record& record);
  // The buckets' versions may be those of one shard.
  bool FollowEachOther(uint64_t oldest, uint64_t newest) const;
  // Of every bucket with its version, once all records were replayed: what the rounds are restored from.
  Rounds::Recovered OpenBuckets(uint64_t oldest, uint64_t newest, const ReplayState& replay);

  JobParts& parts_;
  Flow& flow_;
  PastRounds& past_;
  Snapshots& snapshots_;
  JobLog& log_;
  Stages& stages_;
  std::unique_ptr<ReplayState> replay_;  // from Begin to End
  uint64_t version_ = 0;
};

}  // namespace gradwire

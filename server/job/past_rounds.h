// What a job keeps of rounds that are over, for whoever asks again: workers that were away, standbys that begin, and
// the journal behind a snapshot. Chosen with the job's rounds.
//
//   retained: the last update frames of a bucket, whole. owed: older ones, which workers that are away still need.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "common/codec/codec.h"
#include "common/journal/record.h"
#include "server/job/job_parts.h"

namespace gradwire {

// Stateless: what is kept is in BucketState and in the rounds' history.
class PastRounds {
 public:
  explicit PastRounds(JobParts* parts) : parts_(*parts) {}
  virtual ~PastRounds() = default;

  // Keeps the update that has just made the bucket's version.
  virtual void Keep(BucketState& bucket, const UpdateFrame& update, std::vector<journal::Contribution> who)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) = 0;
  // As Keep, for a record whose round is already in the state that the shard was recovered from.
  virtual absl::Status KeepReplayed(BucketState& bucket, const journal::Record& record)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) = 0;
  // Keeps an update that workers are owed, from a record of type kKept.
  void KeepOwed(BucketState& bucket, const journal::Record& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);

  // The bucket as records: its state and, behind it, what else is known of its last rounds, as far as workers may ask.
  // May throw where memory runs out.
  virtual std::vector<journal::Record> CopyOf(BucketState& bucket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) = 0;
  // Whether the record of a state alone tells all that CopyOf would tell behind it.
  virtual bool StateTellsAll() const = 0;
  // How many rounds before a snapshot its journal reaches back.
  virtual uint64_t RoundsBehindSnapshot() const = 0;
  // What workers that are away may ask about rounds before `round`, as records (kKept), the oldest first.
  std::vector<journal::Record> RecordsBefore(BucketState& bucket, uint64_t round)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);

 protected:
  // Drops updates that nobody is owed any more, and the oldest beyond OwedUpdates.
  void LimitOwed(BucketState& bucket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);

  JobParts& parts_;
};

// Rounds that all workers make together: their update frames are pulled.
class PastUpdates final : public PastRounds {
 public:
  using PastRounds::PastRounds;
  void Keep(BucketState& bucket, const UpdateFrame& update, std::vector<journal::Contribution> who) override
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  absl::Status KeepReplayed(BucketState& bucket, const journal::Record& record) override
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  std::vector<journal::Record> CopyOf(BucketState& bucket) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  bool StateTellsAll() const override { return false; }
  uint64_t RoundsBehindSnapshot() const override { return RetainedUpdates(parts_.job); }

 private:
  // `version`: which the update made.
  void Retain(BucketState& bucket, uint64_t version, RetainedUpdate update) ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
};

// Asynchronous rounds: nobody pulls updates, and only which frames were merged is asked for.
class PastFrames final : public PastRounds {
 public:
  using PastRounds::PastRounds;
  void Keep(BucketState&, const UpdateFrame&, std::vector<journal::Contribution>) override {}
  absl::Status KeepReplayed(BucketState&, const journal::Record&) override { return absl::OkStatus(); }
  std::vector<journal::Record> CopyOf(BucketState& bucket) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu);
  bool StateTellsAll() const override { return true; }
  uint64_t RoundsBehindSnapshot() const override { return PlansKept(parts_.job); }
};

}  // namespace gradwire

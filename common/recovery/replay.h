// Applies the records of a journal to a state, without a server: the same decoding and the same optimizer as in a
// round.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/codec/update/update_compressor.h"
#include "common/job/job.h"
#include "common/job/layout.h"
#include "common/journal/record.h"
#include "common/optimizer/optimizer.h"
#include "common/snapshot/shard_state.h"
#include "kernels/backend.h"

namespace gradwire {

// Not thread-safe. Borrows everything but the state.
class ShardReplay {
 public:
  // `from`: what the journal goes on from; null: from the initial parameters, or the states of
  // buckets, in it. Errors: those of MakeCodec.
  static absl::StatusOr<std::unique_ptr<ShardReplay>> Make(const Job* job, const Layout* layout, uint32_t shard,
                                                           kernels::Backend* backend, std::optional<ShardState> from);

  // Takes the next record. Those that make a version beyond `until`, or that the state is past, have no effect. After
  // an error (a record is missing before this one: DataLoss; those of decoding) its bucket stays where it is.
  absl::Status Apply(const journal::Record& record, uint64_t until = UINT64_MAX);

  // That all buckets have come to.
  uint64_t version() const;
  // That a server would recover: the parameters are there, and no bucket is further ahead of another one than
  // rounds may be.
  bool whole() const;
  // Nothing was ever trained or initialized.
  bool empty() const;
  // Its version is version(); buckets may be ahead of it.
  const ShardState& state() const { return state_; }
  ShardState Take();

 private:
  struct Bucket {
    uint64_t version = 0;
    bool stuck = false;
    std::optional<uint64_t> incarnation;  // of the worker whose initial parameters it has; 0: it has a later state
    std::vector<RunState> runs;
  };

  ShardReplay(const Job* job, const Layout* layout, uint32_t shard, kernels::Backend* backend)
      : job_(*job), layout_(*layout), shard_(shard), backend_(*backend), buckets_(layout->bucket_count(shard)) {}
  absl::Status Prepare(std::optional<ShardState> from);
  absl::Status ApplyTo(Bucket& bucket, const journal::Record& record, uint64_t until);

  const Job& job_;
  const Layout& layout_;
  const uint32_t shard_;
  kernels::Backend& backend_;
  ShardState state_;
  std::vector<Bucket> buckets_;
  ResidualChange change_;  // of one record
};

}  // namespace gradwire

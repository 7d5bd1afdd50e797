// From the squares of runs to the squares of tensors, the same bits for any number of shards: runs are added in their
// order, wherever they lie. What shards tell each other for it: proto/NORMS.md.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "common/job/layout.h"
#include "gradwire/v1/peer.pb.h"

namespace gradwire {

// What one shard has of the norms of a phase.
struct ShardSquares {
  std::vector<double> runs;  // [norm][run of the shard]; of no meaning for tensors in `totals`
  // Tensors of the shard whose squares over all shards are known, per norm: from an update that was written before.
  std::map<uint32_t, std::vector<double>> totals;
  v1::RoundFate fate = v1::FATE_UNSPECIFIED;
};

// Whether the round is skipped, by what all shards know of it. What one has agreed on before stays.
bool SkipsRound(std::span<const ShardSquares> of);

// Immutable; thread-safe. Borrows the layout. Takes 8 bytes for each run of the job.
class NormSums {
 public:
  NormSums(const Layout* layout, size_t tensors);

  // The runs of a shard are numbered bucket by bucket, in the order of each slice.
  size_t runs(uint32_t shard) const { return first_run_[shard].back(); }
  size_t first_run(uint32_t bucket, uint32_t shard) const { return first_run_[shard][bucket]; }

  // Over all shards, `of` in their order: [tensor][norm].
  std::vector<double> Add(std::span<const ShardSquares> of, size_t norms) const;

  v1::NormSums Encode(uint32_t shard, const ShardSquares& squares, size_t norms) const;
  // InvalidArgument: not what `shard` would say of so many norms.
  absl::StatusOr<ShardSquares> Decode(uint32_t shard, const v1::NormSums& message, size_t norms) const;
  // The largest message of any shard.
  uint64_t MaxMessageBytes(size_t norms) const;

 private:
  struct Place {
    uint32_t shard = 0;
    uint32_t run = 0;
  };

  const Layout& layout_;
  std::vector<std::vector<size_t>> first_run_;  // [shard][bucket], and behind the last one
  std::vector<Place> places_;                   // of all runs, by tensor and offset
  std::vector<size_t> first_place_;             // by tensor, and behind the last one
};

}  // namespace gradwire

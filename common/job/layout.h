// The shard map: which elements of which tensors lie on which shard, and how they travel (buckets).
// A pure function of (job spec, shard count); every party computes it and compares digest().
//
// Tensors are cut into runs of `run_elements` (Job::run_elements: fewer where a codec wants finer balance). A run lies
// on exactly one shard, and an exponent belongs to a run, so nothing that is computed from a run depends on how many
// shards there are. Runs are dealt to shards in a hashed order, always to the emptiest shard of those still open in
// this turn, so hot regions spread evenly: one by one, or, with JobSpec.slice_bytes, so many that follow each other in
// backward order. What a bucket has on one shard is a slice: a frame each way in each round. A frame costs some tens of
// microseconds on either side however little it carries, so codecs that send little have few and large slices.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "common/job/job.h"

namespace gradwire {

// Consecutive elements of one tensor that lie on one shard.
struct Run {
  uint32_t tensor = 0;  // index into Job::tensors
  uint32_t length = 0;  // elements, 1 to run_elements
  uint64_t offset = 0;  // first element within the tensor
};

// A slice: the part of one bucket that one shard owns, what one frame carries. To its shard it is the bucket. Positions
// in frames count through `runs`.
struct BucketLayout {
  uint32_t bucket = 0;  // among those of its shard: what frames and records say
  uint32_t shard = 0;
  uint32_t job_bucket = 0;          // the bucket it is a part of
  uint32_t codec = 0;               // index into Job::codecs and Job::update_codecs; one per bucket
  std::vector<Run> runs;            // in order of (position of tensor in the bucket, offset); may be empty
  std::vector<uint64_t> run_begin;  // runs.size() + 1 positions
  uint64_t elements = 0;
  uint32_t shape_digest = 0;  // of codec, runs, seed and worker bound: frames carry it
};

// A part of a tensor that travels in one bucket (over all shards).
struct BucketPart {
  uint32_t tensor = 0;
  uint64_t begin = 0;  // elements; a multiple of run_elements
  uint64_t end = 0;
};

// Immutable after Make; thread-safe.
class Layout {
 public:
  // Errors: InvalidArgument for shard_count 0 or > 4096.
  static absl::StatusOr<Layout> Make(const Job& job, uint32_t shard_count);

  uint32_t shard_count() const { return shard_count_; }
  // Buckets of the job, numbered in backward order: bucket 0 holds the last tensors of the forward pass.
  uint32_t bucket_count() const { return static_cast<uint32_t>(buckets_.size()); }
  std::span<const BucketPart> parts(uint32_t job_bucket) const { return buckets_[job_bucket]; }

  // All slices, ordered by job bucket and shard: those of a bucket are [first_slice(b), first_slice(b + 1)).
  std::span<const BucketLayout> slices() const { return slices_; }
  uint32_t first_slice(uint32_t job_bucket) const { return first_slice_[job_bucket]; }
  // A shard's own, in the same order; at least one. `bucket`: among them.
  uint32_t bucket_count(uint32_t shard) const { return static_cast<uint32_t>(of_shard_[shard].size()); }
  std::span<const uint32_t> slices_of(uint32_t shard) const { return of_shard_[shard]; }
  uint32_t slice_of(uint32_t bucket, uint32_t shard) const { return of_shard_[shard][bucket]; }
  const BucketLayout& at(uint32_t bucket, uint32_t shard) const { return slices_[slice_of(bucket, shard)]; }
  // The slice of a bucket of the job on a shard; null: it has none.
  const BucketLayout* find(uint32_t job_bucket, uint32_t shard) const;
  uint64_t shard_elements(uint32_t shard) const { return shard_elements_[shard]; }
  uint64_t digest() const { return digest_; }

 private:
  uint32_t shard_count_ = 0;
  std::vector<std::vector<BucketPart>> buckets_;
  std::vector<BucketLayout> slices_;
  std::vector<uint32_t> first_slice_;            // bucket_count() + 1
  std::vector<std::vector<uint32_t>> of_shard_;  // indices into slices_
  std::vector<uint64_t> shard_elements_;
  uint64_t digest_ = 0;
};

}  // namespace gradwire

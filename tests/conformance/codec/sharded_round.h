// One round of one tensor that lies on several shards, pushed by workers that each have a thread, without servers: what
// codecs cost on the wire as a whole, and whether the shards together give the sum.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/codec/codec.h"
#include "common/job/job.h"
#include "common/job/layout.h"
#include "kernels/backend.h"

namespace gradwire::testing {

struct ShardedOptions {
  std::string codec;  // one whose rounds need no plan
  uint64_t elements = 1;
  uint32_t shards = 1;
  uint32_t workers = 1;
  uint32_t run_elements = 4096;
  uint64_t seed = 1;
};

struct ShardedResult {
  // Bytes of frames, headers counted.
  std::vector<std::vector<uint64_t>> push_bytes;  // [worker][shard]
  std::vector<uint64_t> update_bytes;             // [shard]
  std::vector<uint64_t> update_elements;          // [shard]; the union of what workers sent
  std::vector<Traffic> traffic;                   // [shard]
  std::vector<float> mean;                        // of all elements
};

// Not thread-safe. Steps that must succeed abort when they do not.
class ShardedRound {
 public:
  explicit ShardedRound(const ShardedOptions& options);
  // gradients[w]: of worker w, `elements` values. Every worker encodes for all shards, beginning with another one, and
  // its chunks are merged as they come, mixed with those of the others.
  ShardedResult Exchange(const std::vector<std::vector<float>>& gradients);
  const Layout& layout() const { return *layout_; }
  // How many of the elements for which `there` is true lie on each shard.
  std::vector<uint64_t> CountPerShard(const std::vector<bool>& there) const;

 private:
  ShardedOptions options_;
  std::unique_ptr<Job> job_;
  std::unique_ptr<Layout> layout_;
  std::unique_ptr<kernels::Backend> backend_;
  std::vector<std::unique_ptr<Codec>> codecs_;  // [shard]
};

// The largest share of `counts` relative to the mean.
double ImbalanceOf(const std::vector<uint64_t>& counts);

}  // namespace gradwire::testing

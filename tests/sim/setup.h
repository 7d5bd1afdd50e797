// The job of one simulated run and what everybody derives from its spec.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/include/gradwire/session.h"
#include "common/codec/codec.h"
#include "common/job/job.h"
#include "common/job/layout.h"
#include "common/job/round_mode.h"
#include "kernels/backend.h"
#include "tests/sim/world.h"

namespace gradwire::sim {

inline constexpr float kLearningRate = 0.1f;

// Immutable once made. Workers, servers and the oracle borrow it.
struct Setup {
  uint32_t workers = 1;
  uint32_t shards = 1;
  bool standbys = false;       // of every shard one
  uint64_t segment_bytes = 0;  // of journals; a snapshot is wanted after about as many
  size_t chunk_bytes = 0;      // of pushed frames; 0: as encoders cut them
  PullMode pull = PullMode::kUpdate;
  std::unique_ptr<Job> job;
  std::unique_ptr<Layout> layout;
  std::unique_ptr<kernels::Backend> backend;
  std::vector<std::unique_ptr<Codec>> codecs;  // of Layout::slices()

  uint32_t slices() const { return static_cast<uint32_t>(codecs.size()); }
  const BucketLayout& LayoutOf(uint32_t slice) const { return layout->slices()[slice]; }
  std::vector<const Codec*> CodecPointers() const;
  // The parameters of version 0, per tensor: the same for every worker.
  std::vector<std::vector<float>> InitialParameters() const;
  // With a quorum the deadline is learned first.
  uint64_t rounds_before_faults() const { return job->spec().rounds().quorum() > 0 ? 11 : 2; }
  bool async() const { return IsAsync(*job); }
  // Rounds that workers have open beside the oldest one.
  uint64_t staleness() const { return async() ? 0 : job->spec().rounds().staleness(); }
  // What a round may return to a residual only to within a rounding, or beside frames on their way.
  bool returns_by_addition() const { return job->two_phase() || staleness() > 0; }
  bool waits_for_disk() const;     // fsync, or interval with the policy to wait
  bool may_lose_versions() const;  // by a loss of power
  std::string ToString() const;
};

// A job that `world`'s seed chooses.
std::unique_ptr<Setup> MakeSetup(World& world);

}  // namespace gradwire::sim

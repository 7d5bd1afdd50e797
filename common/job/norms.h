// What the shards of a job have to agree on before an update can be applied: norms of whole tensors, and whether the
// round is skipped; and in which order a shard has its tensors and runs. What is done with them: proto/NORMS.md.
#pragma once

#include <cstdint>
#include <vector>

#include "common/job/job.h"
#include "common/job/layout.h"

namespace gradwire {

enum class Norm : uint8_t {
  kGradient,   // of the mean, as it was pushed
  kParameter,  // before the step
  kMoment,     // of the direction of the first moment: LAMB's u, LANS's R
  kCandidate,  // of the direction of the gradient: LANS's Q
};

// The norms that have to be known at the same time, phase by phase: those of a later phase depend on those of an
// earlier one. A phase may have none: the shards agree on whether they skip the round, which they do in the first one.
// Empty: no bucket waits for another.
std::vector<std::vector<Norm>> NormPhases(const Job& job);
// All of them, in that order: what an update frame says of each of its tensors.
std::vector<Norm> NormsOf(const Job& job);
inline bool ClipsNorm(const Job& job) { return job.spec().clip_norm() != 0; }
// A round with a gradient that is not finite is skipped, on all shards alike.
inline bool SkipsNonFinite(const Job& job) { return job.spec().nonfinite() == v1::NONFINITE_SKIP; }

// The tensors of a slice, each once, in the order of its runs; those of one are together.
std::vector<uint32_t> TensorsOf(const BucketLayout& slice);

}  // namespace gradwire

// What codecs draw from (draw.h): the same for every sharding and order of tensors. Spec: proto/WIRE.md, "Sparse
// segments".
#pragma once

#include <cstdint>

#include "common/base/hash.h"
#include "common/job/job.h"
#include "common/job/layout.h"
#include "kernels/math/select.h"

namespace gradwire {

// What all workers draw for a run in a round.
inline uint64_t SharedSalt(const Job& job, const Run& run, uint64_t round) {
  return HashCombine(HashCombine(job.spec().seed(), round), HashString(job.tensors()[run.tensor].name, run.offset));
}

// What one worker draws; `draws` is FrameIdentity's.
inline uint64_t WorkerSalt(const Job& job, const Run& run, uint64_t round, uint64_t draws) {
  const uint64_t tensor = HashString(job.tensors()[run.tensor].name, run.offset);
  return HashCombine(HashCombine(job.spec().seed(), draws), HashCombine(tensor, round));
}

// Which of a tensor's elements of equal magnitude go first.
inline uint32_t TiePhaseOf(const Job& job, const Run& run, uint64_t round) {
  return kernels::TiePhase(job.spec().seed(), HashString(job.tensors()[run.tensor].name), round);
}

}  // namespace gradwire

// Random-k: the positions that every worker sends in a round, known to all from the job's seed.
#pragma once

#include <cstdint>
#include <vector>

#include "common/job/job.h"
#include "common/job/layout.h"

namespace gradwire::sparse {

// Appends those of [begin, begin + count), ascending: each element with probability `density`, drawn from (seed, round,
// tensor, element) alone, so neither the sharding nor the order of tensors matters.
void AgreedPositions(const Job& job, const BucketLayout& layout, uint64_t round, double density, uint64_t begin,
                     uint64_t count, std::vector<uint32_t>* out);

}  // namespace gradwire::sparse

// Makes what a job is made of: the one place that asks where its arrays lie. (Its rounds: by_rounds.h.)
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "common/job/job.h"
#include "server/job/job_parts.h"

namespace gradwire {

// Makes the layout, codecs, arrays and rounds of a job, within the memory that it may take. No round is open yet.
// Errors: InvalidArgument (shard index); ResourceExhausted with the numbers; Unimplemented (a device cannot do it);
// those of Layout::Make and MakeCodec.
absl::StatusOr<std::unique_ptr<JobParts>> MakeJobParts(Job job, uint32_t shard_index, uint32_t shard_count,
                                                       const JobEnvironment& environment);

}  // namespace gradwire

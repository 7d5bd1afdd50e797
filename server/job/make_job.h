// Makes what a job is made of: the one place that asks where its arrays lie. (Its rounds: by_rounds.h.)
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/job/job.h"
#include "common/job/layout.h"
#include "server/job/job_parts.h"

namespace gradwire {

// Makes the layout, codecs, arrays and rounds of a job, within the memory that it may take. No round is open yet.
// Errors: InvalidArgument (shard index); ResourceExhausted with the numbers; Unimplemented (a device cannot do it);
// those of Layout::Make and MakeCodec. layout_digest: as of CheckLayoutDigest, which comes before what is large.
absl::StatusOr<std::unique_ptr<JobParts>> MakeJobParts(Job job, uint32_t shard_index, uint32_t shard_count,
                                                       const JobEnvironment& environment, uint64_t layout_digest = 0);

// FailedPrecondition where a worker's shard map of this job is another one, by its digest. 0: any.
absl::Status CheckLayoutDigest(const Job& job, const Layout& layout, uint64_t layout_digest);

}  // namespace gradwire

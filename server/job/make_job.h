// Makes what a job is made of: the one place that asks which kind of rounds it has, and where its arrays lie.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "common/job/job.h"
#include "server/desk/answers.h"
#include "server/flow/flow.h"
#include "server/job/job_parts.h"
#include "server/job/past_rounds.h"

namespace gradwire {

// Makes the layout, codecs, arrays and rounds of a job, within the memory that it may take. No round is open yet.
// Errors: InvalidArgument (shard index); ResourceExhausted with the numbers; Unimplemented (a device cannot do it);
// those of Layout::Make and MakeCodec.
absl::StatusOr<std::unique_ptr<JobParts>> MakeJobParts(Job job, uint32_t shard_index, uint32_t shard_count,
                                                       const JobEnvironment& environment);

// What differs by the kind of the job's rounds, beside the Rounds themselves.
struct ByRounds {
  std::unique_ptr<Flow> flow;
  std::unique_ptr<PastRounds> past;
  std::unique_ptr<Answers> answers;
};
ByRounds MakeByRounds(JobParts* parts);

}  // namespace gradwire

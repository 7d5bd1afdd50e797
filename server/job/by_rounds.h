// The one place of the server that asks which kind of rounds a job has, synchronous or asynchronous.
#pragma once

#include <cstdint>
#include <memory>

#include "common/job/job.h"
#include "server/desk/answers.h"
#include "server/flow/flow.h"
#include "server/job/job_parts.h"
#include "server/job/past_rounds.h"
#include "server/rounds/rounds.h"

namespace gradwire {

// What the kind of a job's rounds means for what it holds.
struct RoundNeeds {
  uint32_t open = 1;              // that frames are merged into at once
  bool pulls_updates = true;      // and the optimizer's state; else nothing but parameters is pulled
  uint64_t waiting_versions = 0;  // serialized for pullers beside the newest and the one before it
  uint64_t plans = 0;             // of older versions, kept for each bucket
  uint32_t frames_known = 0;      // of each worker and bucket
  uint64_t frames_in_flight = 0;  // partial ones, held at once
};
RoundNeeds RoundNeedsOf(const Job& job);

// `recognize_repeats`: JobEnvironment.
std::unique_ptr<Rounds> MakeRounds(const Job& job, uint32_t buckets, bool recognize_repeats);

// What else differs by the kind of the rounds.
struct ByRounds {
  std::unique_ptr<Flow> flow;
  std::unique_ptr<PastRounds> past;
  std::unique_ptr<Answers> answers;
};
ByRounds MakeByRounds(JobParts* parts);

}  // namespace gradwire

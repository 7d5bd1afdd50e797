// See by_rounds.h.
#include "server/job/by_rounds.h"

#include <algorithm>

#include "common/codec/plan/plan_window.h"
#include "common/job/round_mode.h"
#include "server/flow/async_flow.h"
#include "server/flow/round_flow.h"
#include "server/rounds/async_rounds.h"
#include "server/rounds/joint_rounds.h"

namespace gradwire {
namespace {

constexpr TimeNs kNsPerMs = 1'000'000;

// Partial frames of this many workers are held at once; more are refused and come again in the next round.
constexpr uint64_t kFramesInFlight = 8;

}  // namespace

RoundNeeds RoundNeedsOf(const Job& job) {
  const uint32_t staleness = job.spec().rounds().staleness();
  const uint64_t workers = std::max<uint32_t>(1, job.spec().max_workers());
  // Every worker may be sent a version of its own.
  if (IsAsync(job)) return {1, false, job.spec().max_workers(), PlansKept(job), AsyncRounds::kFramesKnown, workers};
  // While a version waits for the disk, as many more may follow.
  return {1 + staleness, true, staleness, 0, JointRounds::FramesKnown(staleness), std::min(kFramesInFlight, workers)};
}

std::unique_ptr<Rounds> MakeRounds(const Job& job, uint32_t buckets, bool recognize_repeats) {
  if (IsAsync(job)) {
    AsyncRounds::Rules rules;
    rules.buckets = buckets;
    rules.window = PlansKept(job);
    rules.needs_initialization = job.keeps_parameters();
    rules.recognize_repeats = recognize_repeats;
    rules.membership.max_workers = job.spec().max_workers();
    rules.membership.lease_ns = job.spec().lease_ms() * kNsPerMs;
    return std::make_unique<AsyncRounds>(rules);
  }
  JointRounds::Rules rules;
  rules.buckets = buckets;
  rules.min_workers = job.spec().min_workers();
  rules.needs_initialization = job.keeps_parameters();
  rules.recognize_repeats = recognize_repeats;
  rules.membership.max_workers = job.spec().max_workers();
  rules.membership.lease_ns = job.spec().lease_ms() * kNsPerMs;
  rules.quorum = job.spec().rounds().quorum();
  rules.deviations = job.spec().rounds().deviations();
  rules.staleness = job.spec().rounds().staleness();
  rules.rounds_per_step = RoundsPerStep(job);
  return std::make_unique<JointRounds>(rules);
}

ByRounds MakeByRounds(JobParts* parts) {
  if (IsAsync(parts->job)) {
    return {std::make_unique<AsyncFlow>(parts), std::make_unique<PastFrames>(parts),
            std::make_unique<NewestAnswers>(&parts->job)};
  }
  return {std::make_unique<RoundFlow>(parts), std::make_unique<PastUpdates>(parts),
          std::make_unique<RoundAnswers>(&parts->job)};
}

}  // namespace gradwire

// What the rooms of one job share: what it is, its buckets, its rounds, and where its records go.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "common/job/job.h"
#include "common/job/layout.h"
#include "common/trace/recorder.h"
#include "server/job/bucket_state.h"
#include "server/job/in_flight.h"
#include "server/job/job_arrays.h"
#include "server/job/job_environment.h"
#include "server/job/memory.h"
#include "server/job/memory_account.h"
#include "server/job/traffic_accounts.h"
#include "server/rounds/rounds.h"

namespace gradwire {

// Owned by the JobShard, which makes and outlives the rooms. The order of locks: ParameterDigest's, BucketState::mu,
// JobParts::mu, then the locks that rooms have for themselves, which are innermost. Nothing is sent and no I/O is
// done under any of them.
struct JobParts {
  JobParts(Job made_of, Layout laid_out, uint32_t shard, const JobEnvironment& around, std::unique_ptr<Rounds> machine)
      : job(std::move(made_of)),
        layout(std::move(laid_out)),
        shard_index(shard),
        environment(around),
        rounds(std::move(machine)) {}

  // The newest version that any bucket has.
  uint64_t NewestVersion() const {
    uint64_t newest = 0;
    for (const auto& bucket : buckets) {
      absl::MutexLock lock(&bucket->mu);
      newest = std::max(newest, bucket->version);
    }
    return newest;
  }

  // The time, for the rounds. Where this process has been stopped, those who are late are excused first: the ticker,
  // which sees to that for all jobs, may come behind the frames that arrived meanwhile.
  TimeNs NowOfRounds() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    const TimeNs now = environment.clock->Now();
    if (environment.slept) Excuse(environment.slept(now), now);
    return now;
  }
  // This process did not run for so long before `now`: see Rounds::Excuse. What was excused before is so once.
  void Excuse(TimeNs slept, TimeNs now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    const TimeNs from = std::max(now - slept, excused_until);
    if (slept <= 0 || from >= now) return;
    rounds->Excuse(now - from, now);
    excused_until = now;
  }

  // Constant.
  const Job job;
  const Layout layout;
  const uint32_t shard_index;
  const JobEnvironment environment;

  // Constant once the job is made.
  MemoryAccount::Share share;  // set by whoever makes the job and takes it out; destroyed after the arrays
  MemoryBound memory;
  uint64_t unsent_limit_bytes = 0;  // of one member's answers
  std::unique_ptr<JobArrays> arrays;
  std::vector<std::unique_ptr<BucketState>> buckets;  // each synchronises itself
  // Carries out what the rounds decided; no lock is held.
  std::function<void(RoundActions)> run;

  // Synchronise themselves.
  InFlight in_flight;
  TrafficAccounts traffic;
  TraceRecorder trace{environment.clock};
  std::atomic<bool> replaying{false};  // nobody has joined yet: records are being replayed, or a primary is followed

  mutable absl::Mutex mu;
  const std::unique_ptr<Rounds> rounds ABSL_PT_GUARDED_BY(mu);
  TimeNs excused_until ABSL_GUARDED_BY(mu) = std::numeric_limits<TimeNs>::min();
  MemoryAccount::Share trace_share ABSL_GUARDED_BY(mu);  // of `trace`, which the bound does not cover
  absl::Status shut ABSL_GUARDED_BY(mu);                 // not ok: the job is gone, and this is why
};

}  // namespace gradwire

// Which rounds a job has, where code differs by it. What they promise: proto/ROUNDS.md.
#pragma once

#include "common/job/job.h"

namespace gradwire {

// Every frame makes a version of its bucket by itself; a frame's round is the version that it was computed on.
inline bool IsAsync(const Job& job) { return job.spec().rounds().mode() == v1::ROUNDS_ASYNC; }

// How many versions the shards of a job may be apart while nothing is lost, unless its rounds are asynchronous: workers
// begin a round when every shard has made the versions that it is computed on.
inline uint64_t MostApart(const Job& job) { return 1 + job.spec().rounds().staleness(); }

inline uint32_t RoundsPerStep(const Job& job) { return job.two_phase() ? 2 : 1; }

// Whether frames of a round carry gradients. Round 0 calibrates; in a job with two phases (PowerSGD) every even round
// prepares the one behind it, which carries the values of the same step.
inline bool CarriesValues(const Job& job, uint64_t round) { return job.two_phase() ? round % 2 == 1 : round != 0; }

// Which step of the optimizer, from 1 on, a round that carries values makes.
inline uint64_t StepOf(const Job& job, uint64_t round) { return job.two_phase() ? (round + 1) / 2 : round; }

// How many steps have been made by a version: those of the rounds before it.
inline uint64_t StepsIn(const Job& job, uint64_t version) {
  return job.two_phase() ? version / 2 : version - (version != 0 ? 1 : 0);
}

}  // namespace gradwire

// Which rounds a job has, where code differs by it. What they promise: proto/ROUNDS.md.
#pragma once

#include "common/job/job.h"

namespace gradwire {

// Every frame makes a version of its bucket by itself; a frame's round is the version that it was computed on.
inline bool IsAsync(const Job& job) { return job.spec().rounds().mode() == v1::ROUNDS_ASYNC; }

}  // namespace gradwire

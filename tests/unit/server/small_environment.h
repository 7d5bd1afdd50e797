// What a small job gets from the server around it.
#pragma once

#include "common/base/clock.h"
#include "kernels/backend.h"
#include "server/job/job_environment.h"

namespace gradwire::testing_support {

inline JobEnvironment SmallEnvironment(kernels::Backend* backend, Clock* clock) {
  JobEnvironment environment;
  environment.backend = backend;
  environment.clock = clock;
  environment.frame_limit_bytes = 1 << 20;
  environment.job_memory_limit_bytes = 1 << 28;
  return environment;
}

}  // namespace gradwire::testing_support

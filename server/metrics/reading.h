// What one scrape reads: the status of a server and of its jobs.
#pragma once

#include <cstdint>
#include <vector>

#include "gradwire/v1/operator.pb.h"

namespace gradwire::metrics {

struct Reading {
  v1::ShardStatus shard;
  uint64_t unrecovered_jobs = 0;
  std::vector<v1::JobStatus> jobs;  // with details
};

}  // namespace gradwire::metrics

// The status of a server and its jobs as Prometheus metrics. Every value is one that DescribeShard, DescribeJob or
// the registry tells; nothing is counted here.
#pragma once

#include <prometheus/metric_family.h>

#include <cstddef>
#include <vector>

#include "server/metrics/reading.h"

namespace gradwire::metrics {

// Series of buckets are given for so many buckets of a job, the first ones: a job may have thousands.
inline constexpr size_t kMaxTrafficBuckets = 64;
// And of workers for so many of them.
inline constexpr int kMaxWorkersTold = 256;

// One family per metric that has a value, in a fixed order. Labels: job and shard; worker; follower; bucket, codec and
// form.
// No two series of a family have the same labels.
std::vector<prometheus::MetricFamily> ToFamilies(const Reading& reading);

}  // namespace gradwire::metrics

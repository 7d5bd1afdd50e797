// The service of people and tools: create, describe, list and delete jobs (proto/gradwire/v1/operator.proto).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "gradwire/v1/operator.pb.h"
#include "server/job/job_registry.h"
#include "server/metrics/reading.h"
#include "server/replication/replication.h"

namespace gradwire {

// Thread-safe. Registry and replication outlive the service. What would change a job is refused where workers are not
// served.
class OperatorService {
 public:
  OperatorService(JobRegistry* registry, Replication* replication)
      : registry_(registry), replication_(replication), started_(registry->environment().clock->Now()) {}

  // `method` without the service's name. Unimplemented for an unknown one.
  absl::StatusOr<std::string> Call(std::string_view method, std::string_view request);

  // What DescribeShard, and DescribeJob of every job, answer now.
  metrics::Reading Read();

 private:
  absl::StatusOr<v1::CreateJobReply> CreateJob(const v1::CreateJobRequest& request);
  absl::StatusOr<v1::JobStatus> DescribeJob(const v1::DescribeJobRequest& request);
  absl::StatusOr<v1::ListJobsReply> ListJobs(const v1::ListJobsRequest& request);
  absl::StatusOr<v1::DeleteJobReply> DeleteJob(const v1::DeleteJobRequest& request);
  absl::StatusOr<v1::TakeSnapshotReply> TakeSnapshot(const v1::TakeSnapshotRequest& request);
  absl::StatusOr<v1::PromoteReply> Promote(const v1::PromoteRequest& request);
  absl::StatusOr<v1::RecordTraceReply> RecordTrace(const v1::RecordTraceRequest& request);
  absl::StatusOr<v1::TracePage> ReadTrace(const v1::ReadTraceRequest& request);
  v1::ShardStatus DescribeShard() const;

  JobRegistry* const registry_;
  Replication* const replication_;
  const TimeNs started_;
};

}  // namespace gradwire

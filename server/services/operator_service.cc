// Handlers of the operator's service; see operator_service.h.
#include "server/services/operator_service.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "common/base/names.h"
#include "common/base/status_macros.h"
#include "server/services/unary.h"

namespace gradwire {
namespace {

constexpr TimeNs kSecond = 1'000'000'000;
constexpr uint64_t kMaxTracedRounds = 1000;
constexpr uint32_t kMaxTracePage = 4096;
constexpr char kServerVersion[] = GRADWIRE_VERSION;

}  // namespace

absl::StatusOr<std::string> OperatorService::Call(std::string_view method, std::string_view request) {
  if (method == "CreateJob") {
    return HandleToldUnary<v1::CreateJobRequest>(registry_, method, request,
                                                 [this](const auto& r) { return CreateJob(r); });
  }
  if (method == "DescribeJob") {
    return HandleUnary<v1::DescribeJobRequest>(request, [this](const auto& r) { return DescribeJob(r); });
  }
  if (method == "ListJobs") {
    return HandleUnary<v1::ListJobsRequest>(request, [this](const auto& r) { return ListJobs(r); });
  }
  if (method == "DeleteJob") {
    return HandleUnary<v1::DeleteJobRequest>(request, [this](const auto& r) { return DeleteJob(r); });
  }
  if (method == "TakeSnapshot") {
    return HandleUnary<v1::TakeSnapshotRequest>(request, [this](const auto& r) { return TakeSnapshot(r); });
  }
  if (method == "Promote") {
    return HandleUnary<v1::PromoteRequest>(request, [this](const auto& r) { return Promote(r); });
  }
  if (method == "DescribeShard") {
    return HandleUnary<v1::DescribeShardRequest>(
        request, [this](const auto&) -> absl::StatusOr<v1::ShardStatus> { return DescribeShard(); });
  }
  if (method == "RecordTrace") {
    return HandleUnary<v1::RecordTraceRequest>(request, [this](const auto& r) { return RecordTrace(r); });
  }
  if (method == "ReadTrace") {
    return HandleUnary<v1::ReadTraceRequest>(request, [this](const auto& r) { return ReadTrace(r); });
  }
  return absl::UnimplementedError(absl::StrFormat("gradwire.v1.Operator has no method '%s'", Printable(method)));
}

absl::StatusOr<v1::CreateJobReply> OperatorService::CreateJob(const v1::CreateJobRequest& request) {
  GW_RETURN_IF_ERROR(replication_->CheckServing());
  GW_ASSIGN_OR_RETURN(const std::shared_ptr<JobShard> job,
                      registry_->GetOrCreate(request.spec(), request.shard_index(), request.shard_count(), 0));
  v1::CreateJobReply reply;
  reply.set_layout_digest(job->layout().digest());
  return reply;
}

absl::StatusOr<v1::JobStatus> OperatorService::DescribeJob(const v1::DescribeJobRequest& request) {
  GW_ASSIGN_OR_RETURN(const std::shared_ptr<JobShard> job, registry_->Find(request.job()));
  std::string digest;
  if (request.digest()) {
    GW_ASSIGN_OR_RETURN(digest, job->digest().Get());
  }
  v1::JobStatus status = job->Describe(true, false);
  status.set_parameters_sha256(std::move(digest));
  return status;
}

absl::StatusOr<v1::ListJobsReply> OperatorService::ListJobs(const v1::ListJobsRequest&) {
  v1::ListJobsReply reply;
  for (const auto& job : registry_->All()) *reply.add_jobs() = job->Describe(false, false);
  return reply;
}

absl::StatusOr<v1::DeleteJobReply> OperatorService::DeleteJob(const v1::DeleteJobRequest& request) {
  GW_RETURN_IF_ERROR(replication_->CheckServing());
  const bool asks_first = request.only_unused() || request.has_version();
  GW_RETURN_IF_ERROR(asks_first
                         ? registry_->DeleteUnused(
                               request.job(), request.has_version() ? std::optional(request.version()) : std::nullopt)
                         : registry_->Delete(request.job()));
  return v1::DeleteJobReply();
}

absl::StatusOr<v1::TakeSnapshotReply> OperatorService::TakeSnapshot(const v1::TakeSnapshotRequest& request) {
  GW_RETURN_IF_ERROR(registry_->RequestSnapshot(request.job()));
  return v1::TakeSnapshotReply();
}

absl::StatusOr<v1::PromoteReply> OperatorService::Promote(const v1::PromoteRequest& request) {
  v1::PromoteReply reply;
  GW_ASSIGN_OR_RETURN(const uint64_t epoch, replication_->Promote(request.force()));
  reply.set_server_epoch(epoch);
  return reply;
}

absl::StatusOr<v1::RecordTraceReply> OperatorService::RecordTrace(const v1::RecordTraceRequest& request) {
  if (request.rounds() < 1 || request.rounds() > kMaxTracedRounds) {
    return absl::InvalidArgumentError(
        absl::StrFormat("a trace of %d rounds was asked for; allowed are 1 to %d", request.rounds(), kMaxTracedRounds));
  }
  GW_ASSIGN_OR_RETURN(const std::shared_ptr<JobShard> job, registry_->Find(request.job()));
  GW_RETURN_IF_ERROR(job->RecordTrace(request.first_round(), request.rounds()));
  return v1::RecordTraceReply();
}

absl::StatusOr<v1::TracePage> OperatorService::ReadTrace(const v1::ReadTraceRequest& request) {
  GW_ASSIGN_OR_RETURN(const std::shared_ptr<JobShard> job, registry_->Find(request.job()));
  return job->ReadTrace(request.from(), std::min(request.limit(), kMaxTracePage));
}

metrics::Reading OperatorService::Read() {
  metrics::Reading reading;
  reading.shard = DescribeShard();
  reading.unrecovered_jobs = registry_->unrecovered();
  for (const auto& job : registry_->All()) reading.jobs.push_back(job->Describe(true, false));
  return reading;
}

v1::ShardStatus OperatorService::DescribeShard() const {
  const JobEnvironment& environment = registry_->environment();
  v1::ShardStatus status;
  status.set_version(kServerVersion);
  status.set_backend(std::string(environment.backend_name()));
  status.set_uptime_s(static_cast<uint64_t>((environment.clock->Now() - started_) / kSecond));
  status.set_memory_bytes(registry_->memory_bytes());
  status.set_memory_limit_bytes(registry_->limits().memory_bytes);
  status.set_jobs(static_cast<uint32_t>(registry_->All().size()));
  status.set_draining(registry_->draining());
  replication_->Describe(&status);
  return status;
}

}  // namespace gradwire

// Join, Heartbeat, Leave; streams are in push_sink and pull_sink. See worker_service.h.
#include "server/services/worker_service.h"

#include "absl/strings/str_format.h"
#include "common/base/names.h"
#include "common/base/status_macros.h"
#include "server/services/pull_sink.h"
#include "server/services/push_sink.h"
#include "server/services/unary.h"

namespace gradwire {

namespace {

std::vector<std::string> AddressesOf(const v1::JoinRequest& request) {
  return {request.shards().begin(), request.shards().end()};
}

// A worker that was taken says where the shards are; one that was refused says nothing.
absl::StatusOr<v1::JoinReply> Taken(JobShard& job, const v1::JoinRequest& request,
                                    absl::StatusOr<v1::JoinReply> joined) {
  const v1::WorkerIdentity& identity = request.identity();
  if (joined.ok()) job.SetAddresses(MakeMemberId(identity.worker(), identity.incarnation()), AddressesOf(request));
  return joined;
}

}  // namespace

absl::StatusOr<std::string> WorkerService::Call(std::string_view method, std::string_view request) {
  if (method == "Heartbeat") {
    return HandleUnary<v1::HeartbeatRequest>(request, [this](const auto& r) { return Heartbeat(r); });
  }
  if (method == "Join") {
    return HandleToldUnary<v1::JoinRequest>(registry_, method, request, [this](const auto& r) { return Join(r); });
  }
  if (method == "Leave") return HandleUnary<v1::LeaveRequest>(request, [this](const auto& r) { return Leave(r); });
  return absl::UnimplementedError(absl::StrFormat("gradwire.v1.Worker has no unary method '%s'", Printable(method)));
}

absl::StatusOr<std::unique_ptr<transport::StreamSink>> WorkerService::Accept(
    std::string_view method, std::shared_ptr<transport::Stream> stream) {
  auto out = std::make_shared<Outbox>(std::move(stream));
  std::unique_ptr<transport::StreamSink> sink;
  if (method == "Push") sink = std::make_unique<PushSink>(registry_, std::move(out));
  if (method == "Pull") sink = std::make_unique<PullSink>(registry_, std::move(out));
  if (sink == nullptr) {
    return absl::UnimplementedError(absl::StrFormat("gradwire.v1.Worker has no stream '%s'", Printable(method)));
  }
  return sink;
}

absl::StatusOr<v1::JoinReply> WorkerService::Join(const v1::JoinRequest& request) {
  const v1::WorkerIdentity& identity = request.identity();
  if (identity.job() != request.spec().name()) {
    return absl::InvalidArgumentError(absl::StrFormat("the worker joins job '%s' with the spec of job '%s'",
                                                      Printable(identity.job()), Printable(request.spec().name())));
  }
  if (request.resume() || request.catch_up()) return GoOn(request);
  GW_ASSIGN_OR_RETURN(
      const std::shared_ptr<JobShard> job,
      registry_->GetOrCreate(request.spec(), request.shard_index(), request.shard_count(), request.layout_digest()));
  GW_RETURN_IF_ERROR(job->CheckAddresses(AddressesOf(request)));
  const absl::StatusOr<v1::JoinReply> joined =
      job->Join(identity, request.start_version(), request.may_initialize(), request.other_version());
  if (absl::IsDataLoss(joined.status())) registry_->ForgetUnused(job);
  return Taken(*job, request, joined);
}

absl::StatusOr<v1::JoinReply> WorkerService::GoOn(const v1::JoinRequest& request) {
  GW_RETURN_IF_ERROR(replication_->CheckNotReplaced(request.known_epoch(), request.known_lineage()));
  GW_ASSIGN_OR_RETURN(const std::shared_ptr<JobShard> job, registry_->Find(request.spec().name()));
  GW_ASSIGN_OR_RETURN(const Job asked, Job::Make(request.spec()));
  GW_RETURN_IF_ERROR(job->CheckSame(asked, request.shard_index(), request.shard_count(), request.layout_digest()));
  GW_RETURN_IF_ERROR(job->CheckInstance(request.known_instance()));
  GW_RETURN_IF_ERROR(job->CheckAddresses(AddressesOf(request)));
  Rounds::ResumePoint point;
  point.round = request.resume_round();
  const JobEnvironment& environment = registry_->environment();
  const bool other_lineage = request.known_lineage() != 0 && request.known_lineage() != *environment.server_lineage;
  point.from_before = request.known_epoch() != 0 && (other_lineage || !environment.epochs->Has(request.known_epoch()));
  point.seen.assign(request.resume_seen().begin(), request.resume_seen().end());
  point.versions.assign(request.resume_versions().begin(), request.resume_versions().end());
  return Taken(*job, request,
               request.catch_up() ? job->CatchUp(request.identity(), point, request.start_version())
                                  : job->Resume(request.identity(), point));
}

absl::StatusOr<v1::HeartbeatReply> WorkerService::Heartbeat(const v1::HeartbeatRequest& request) {
  GW_ASSIGN_OR_RETURN(const std::shared_ptr<JobShard> job, registry_->Find(request.identity().job()));
  return job->Heartbeat(request);
}

absl::StatusOr<v1::LeaveReply> WorkerService::Leave(const v1::LeaveRequest& request) {
  GW_ASSIGN_OR_RETURN(const std::shared_ptr<JobShard> job, registry_->Find(request.identity().job()));
  GW_RETURN_IF_ERROR(job->Leave(request));
  return v1::LeaveReply();
}

}  // namespace gradwire

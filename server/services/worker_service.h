// The service of training workers: Join, Heartbeat, Leave, and the streams Push and Pull
// (proto/gradwire/v1/worker.proto).
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "common/transport/transport.h"
#include "gradwire/v1/worker.pb.h"
#include "server/job/job_registry.h"
#include "server/replication/replication.h"

namespace gradwire {

// Thread-safe. Registry and replication outlive the service and every stream of it.
class WorkerService {
 public:
  WorkerService(JobRegistry* registry, Replication* replication) : registry_(registry), replication_(replication) {}

  // `method` without the service's name. Unimplemented for an unknown one.
  absl::StatusOr<std::string> Call(std::string_view method, std::string_view request);
  absl::StatusOr<std::unique_ptr<transport::StreamSink>> Accept(std::string_view method,
                                                                std::shared_ptr<transport::Stream> stream);

 private:
  absl::StatusOr<v1::JoinReply> Join(const v1::JoinRequest& request);
  absl::StatusOr<v1::JoinReply> GoOn(const v1::JoinRequest& request);
  absl::StatusOr<v1::HeartbeatReply> Heartbeat(const v1::HeartbeatRequest& request);
  absl::StatusOr<v1::LeaveReply> Leave(const v1::LeaveRequest& request);

  JobRegistry* const registry_;
  Replication* const replication_;
};

}  // namespace gradwire

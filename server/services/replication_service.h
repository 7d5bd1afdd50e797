// The service of standbys: Fence, and the stream Follow (proto/gradwire/v1/replication.proto).
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "common/transport/transport.h"
#include "server/replication/replication.h"

namespace gradwire {

// Thread-safe. What is given outlives the service and every stream of it.
class ReplicationService {
 public:
  explicit ReplicationService(Replication* replication) : replication_(replication) {}

  // `method` without the service's name. Unimplemented for an unknown one.
  absl::StatusOr<std::string> Call(std::string_view method, std::string_view request);
  absl::StatusOr<std::unique_ptr<transport::StreamSink>> Accept(std::string_view method,
                                                                std::shared_ptr<transport::Stream> stream);

 private:
  Replication* const replication_;
};

}  // namespace gradwire

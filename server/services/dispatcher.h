// Routes calls and streams to the service that their method names.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "common/transport/transport.h"
#include "server/services/operator_service.h"
#include "server/services/peer_service.h"
#include "server/services/replication_service.h"
#include "server/services/worker_service.h"

namespace gradwire {

// Thread-safe; what a transport listens with. All services outlive it; workers and other shards are served while
// `replication` says so. A call or stream for which there is no memory
// gets ResourceExhausted; so does one that fails later, in its sink.
class Dispatcher final : public transport::Service {
 public:
  Dispatcher(WorkerService* worker, OperatorService* op, ReplicationService* standbys, PeerService* peers,
             const Replication* replication)
      : worker_(worker), operator_(op), standbys_(standbys), peers_(peers), replication_(replication) {}

  // Unimplemented for a method that no service has.
  absl::StatusOr<std::string> Call(transport::Method method, std::string_view request) override;
  absl::StatusOr<std::unique_ptr<transport::StreamSink>> Accept(transport::Method method,
                                                                std::shared_ptr<transport::Stream> stream) override;

 private:
  WorkerService* const worker_;
  OperatorService* const operator_;
  ReplicationService* const standbys_;
  PeerService* const peers_;
  const Replication* const replication_;
};

}  // namespace gradwire

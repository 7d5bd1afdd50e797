// The service of the other shards of a job: Exchange (proto/gradwire/v1/peer.proto).
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "server/job/job_registry.h"

namespace gradwire {

// Thread-safe. The registry outlives the service.
class PeerService {
 public:
  explicit PeerService(JobRegistry* registry) : registry_(registry) {}

  // `method` without the service's name. Unimplemented for an unknown one.
  absl::StatusOr<std::string> Call(std::string_view method, std::string_view request);

 private:
  JobRegistry* const registry_;
};

}  // namespace gradwire

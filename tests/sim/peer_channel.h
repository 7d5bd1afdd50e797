// What a server calls another one on: the simulated network as a transport::Channel. Of standbys and their primary.
#pragma once

#include <memory>
#include <string>

#include "common/transport/transport.h"
#include "tests/sim/network.h"
#include "tests/sim/server_node.h"

namespace gradwire::sim {

// Not thread-safe. `peer` and `path` outlive it. Calls are answered at once: their callers wait for that.
class PeerChannel final : public transport::Channel {
 public:
  PeerChannel(World* world, ServerNode* peer, Path* path, std::weak_ptr<SimStream>* last)
      : world_(world), peer_(peer), path_(path), last_(last) {}
  absl::StatusOr<std::string> Call(transport::Method method, std::string request, int64_t timeout_ms) override;
  // `*last` is the stream that was opened last.
  absl::StatusOr<std::unique_ptr<transport::Stream>> Open(transport::Method method,
                                                          transport::StreamSink* sink) override;

 private:
  World* const world_;
  ServerNode* const peer_;
  Path* const path_;
  std::weak_ptr<SimStream>* const last_;
};

}  // namespace gradwire::sim

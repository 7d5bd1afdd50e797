// The simulated network: streams between a worker and a server, and unary calls. Messages of one stream come in order;
// streams overtake each other, and calls overtake everything. A connection that breaks loses what is on its way.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/transport/transport.h"
#include "tests/sim/world.h"

namespace gradwire::sim {

// A transport notices a silent peer within about this (transport::Limits::keepalive_ms, twice).
inline constexpr TimeNs kKeepalive = 10 * kSecond;

// Between one worker and one server machine, over all of their connections.
struct Path {
  TimeNs slowest = 2 * kMs;  // of one message
  TimeNs stalled_until = 0;  // partitioned: nothing arrives before
  double loss = 0;           // of requests and of replies
  double repeats = 0;        // of requests
};

// What a stream's client hears.
class ClientEnd {
 public:
  virtual ~ClientEnd() = default;
  virtual void OnMessage(const transport::Message& message) = 0;
  virtual void OnClosed(const absl::Status& status) = 0;
};

// One bidirectional stream. Owned by both of its ends and by what is on its way.
class SimStream : public std::enable_shared_from_this<SimStream> {
 public:
  SimStream(World* world, Path* path) : world_(world), path_(path) {}
  // The stream reaches the server, which answers with a sink or refuses. `server_lives`: false while it dies: what it
  // sends then is lost.
  void Open(transport::Service* service, transport::Method method, std::shared_ptr<ClientEnd> client,
            std::function<bool()> server_lives);

  // By the client.
  absl::Status Send(transport::Message message);

  // The connection is gone: what is on its way is lost, and each end hears of it after its delay.
  void Break(TimeNs client_delay, TimeNs server_delay);
  // The server is destroyed: its sink is gone at once.
  void ServerGone(TimeNs client_delay);
  bool broken() const { return broken_; }

 private:
  class ServerEnd;
  TimeNs Arrival(TimeNs* last);
  void CloseServer(const absl::Status& status);
  void CloseClient(const absl::Status& status);

  World* const world_;
  Path* const path_;
  std::shared_ptr<ClientEnd> client_;  // null: it was told that the stream is closed
  std::unique_ptr<transport::StreamSink> sink_;
  std::function<bool()> server_lives_;
  bool broken_ = false;
  bool finished_ = false;  // by the server
  TimeNs last_up_ = 0;
  TimeNs last_down_ = 0;
};

// A server process; `id` tells it from others before and after it.
struct Target {
  transport::Service* service = nullptr;  // null: nobody listens
  uint64_t id = 0;
};

// One unary call to whatever server `find` gives when the request arrives. `done` runs once.
void Call(World* world, Path* path, std::function<Target()> find, std::string method, std::string request,
          TimeNs timeout, std::function<void(absl::StatusOr<std::string>)> done);

}  // namespace gradwire::sim

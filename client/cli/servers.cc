// See servers.h.
#include "client/cli/servers.h"

#include <utility>

#include "common/base/status_macros.h"

namespace gradwire::cli {

absl::StatusOr<Server> Server::Connect(const std::string& address, int64_t timeout_ms) {
  Server server;
  server.address_ = address;
  server.timeout_ms_ = timeout_ms;
  GW_ASSIGN_OR_RETURN(server.channel_, transport::Dial(address));
  return server;
}

absl::StatusOr<std::string> Server::CallBytes(const std::string& method, std::string request) const {
  absl::StatusOr<std::string> reply = channel_->Call("gradwire.v1.Operator/" + method, std::move(request), timeout_ms_);
  if (reply.ok()) return reply;
  const bool unreachable = absl::IsUnavailable(reply.status()) || absl::IsDeadlineExceeded(reply.status());
  return absl::Status(
      reply.status().code(),
      absl::StrFormat("%s: %s%s", address_, std::string(reply.status().message()),
                      unreachable ? " (is gradwire-server running there, and is the port right?)" : ""));
}

}  // namespace gradwire::cli

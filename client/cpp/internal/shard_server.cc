// See shard_server.h.
#include "client/cpp/internal/shard_server.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/base/status_macros.h"
#include "gradwire/v1/operator.pb.h"

namespace gradwire::client {

absl::StatusOr<Server> Server::Connect(const std::string& address, int64_t timeout_ms) {
  Server server;
  server.address_ = address;
  server.timeout_ms_ = timeout_ms;
  GW_ASSIGN_OR_RETURN(server.channel_, transport::Dial(address));
  return server;
}

absl::StatusOr<Server> Server::ConnectServing(const std::string& addresses, int64_t timeout_ms) {
  const std::vector<std::string> list = absl::StrSplit(addresses, '|');
  if (list.size() == 1) return Connect(addresses, timeout_ms);
  std::optional<Server> best;
  v1::ShardStatus its;
  std::string said;
  for (const std::string& address : list) {
    GW_ASSIGN_OR_RETURN(Server server, Connect(address, timeout_ms));
    const auto status = server.Call<v1::ShardStatus>("DescribeShard", v1::DescribeShardRequest());
    if (!status.ok()) {
      absl::StrAppend(&said, "\n  ", std::string(status.status().message()));
    } else if (status->fenced() || !status->following().empty()) {
      absl::StrAppend(&said, "\n  ", address, status->fenced() ? ": fenced" : ": a standby, see `gradwire promote`");
    } else if (!best || (status->lineage() == its.lineage() && status->server_epoch() > its.server_epoch())) {
      its = *status;  // epochs of servers that have nothing to do with each other are not compared
      best = std::move(server);
    }
  }
  if (best) return *std::move(best);
  return absl::UnavailableError(absl::StrCat("no server of ", addresses, " serves its shard:", said));
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

}  // namespace gradwire::client

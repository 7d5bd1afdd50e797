// See server_choice.h.
#include "client/cpp/internal/server_choice.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"

namespace gradwire::client {
namespace {

constexpr int64_t kAskTimeoutMs = 1000;  // of one server
// What a stream holds is sent in the order in which it came: so little that a small frame is not long behind large ones
// (FrameQueue), and enough for the network while the rest is fetched.
constexpr size_t kSendWindowBytes = 1u << 20;

}  // namespace

absl::Status ServerChoice::Dial() {
  if (!servers_.empty()) return absl::OkStatus();
  std::vector<Server> servers;
  const std::vector<std::string> addresses = absl::StrSplit(addresses_, '|');
  for (const std::string& address : addresses) {
    auto dialled = transport::Dial(address, {.send_window_bytes = kSendWindowBytes});
    if (!dialled.ok()) return dialled.status();
    servers.push_back({address, *std::move(dialled)});
  }
  servers_ = std::move(servers);
  channel_ = servers_[0].channel.get();
  return absl::OkStatus();
}

absl::Status ServerChoice::Choose(const ServerEpoch& known, absl::Time deadline) {
  if (servers_.size() == 1) return absl::OkStatus();
  std::optional<ServerEpoch> best;
  std::string said;
  for (const Server& server : servers_) {
    const int64_t left_ms = absl::ToInt64Milliseconds(deadline - absl::Now());
    const auto status = Describe(server.channel.get(), std::clamp<int64_t>(left_ms, 1, rpc_timeout_ms_));
    if (!status.ok()) {
      absl::StrAppend(&said, said.empty() ? "" : "; ", server.address, ": ", std::string(status.status().message()));
      continue;
    }
    if (status->fenced() || !status->following().empty()) {
      absl::StrAppend(&said, said.empty() ? "" : "; ", server.address,
                      status->fenced() ? " is fenced" : " is a standby");
      continue;
    }
    // Of the lineage that was joined before, and there of the largest epoch; the first one named of those that have
    // nothing to do with each other.
    const ServerEpoch its{status->server_epoch(), status->lineage()};
    const bool same = best && best->lineage == its.lineage;
    if (!best || (same ? best->epoch < its.epoch : its.lineage == known.lineage)) {
      best = its;
      channel_ = server.channel.get();
    }
  }
  return best ? absl::OkStatus() : absl::UnavailableError(absl::StrCat("no server serves this shard: ", said));
}

absl::StatusOr<v1::ShardStatus> ServerChoice::Describe(transport::Channel* channel, int64_t timeout_ms) {
  const auto reply = channel->Call("gradwire.v1.Operator/DescribeShard", "", std::min(kAskTimeoutMs, timeout_ms));
  if (!reply.ok()) return reply.status();
  v1::ShardStatus status;
  if (!status.ParseFromString(*reply)) return absl::DataLossError("its answer cannot be parsed");
  return status;
}

}  // namespace gradwire::client

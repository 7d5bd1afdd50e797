// The servers of one shard, one that serves and its standbys: dialled once, and chosen among before each join.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/transport/transport.h"
#include "gradwire/v1/operator.pb.h"

namespace gradwire::client {

// Epochs are compared within one lineage only (proto/REPLICATION.md).
struct ServerEpoch {
  uint64_t epoch = 0;
  uint64_t lineage = 0;  // 0: not known
  // The server of this epoch was replaced by that of the other.
  bool Before(const ServerEpoch& other) const {
    return lineage != 0 && lineage == other.lineage && epoch < other.epoch;
  }
};

// Thread-safe from Dial until Close.
class ServerChoice {
 public:
  // `addresses`: one, or several with "|" between them.
  ServerChoice(std::string addresses, int64_t rpc_timeout_ms)
      : addresses_(std::move(addresses)), rpc_timeout_ms_(rpc_timeout_ms) {}

  // What was dialled before stays: whoever joins again keeps the streams of the connection.
  absl::Status Dial();
  // Makes the server that is to be joined the channel: of the lineage of `known`, and there of the largest epoch.
  // Unavailable: none serves, and what each of them said.
  absl::Status Choose(const ServerEpoch& known, absl::Time deadline);
  // To the server that was chosen last. Null before Dial.
  transport::Channel* channel() const { return channel_.load(std::memory_order_acquire); }
  // What that server says of itself.
  absl::StatusOr<v1::ShardStatus> Describe() const { return Describe(channel(), rpc_timeout_ms_); }
  // Ends the channels.
  void Close() { servers_.clear(); }

 private:
  struct Server {
    std::string address;
    std::shared_ptr<transport::Channel> channel;
  };
  static absl::StatusOr<v1::ShardStatus> Describe(transport::Channel* channel, int64_t timeout_ms);

  const std::string addresses_;
  const int64_t rpc_timeout_ms_;
  std::vector<Server> servers_;  // constant from Dial until Close
  std::atomic<transport::Channel*> channel_{nullptr};
};

}  // namespace gradwire::client

// Calls of the operator's service on every named server.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "common/transport/transport.h"

namespace gradwire::client {

// One shard server. Errors of its calls name its address and, when it cannot be reached, what to check.
class Server {
 public:
  static absl::StatusOr<Server> Connect(const std::string& address, int64_t timeout_ms);
  // `addresses`: one, or several with '|' between them, of a shard server and its standbys: then the one that serves,
  // with the largest epoch. Unavailable where none does, with what each of them said.
  static absl::StatusOr<Server> ConnectServing(const std::string& addresses, int64_t timeout_ms);

  // `method`: of gradwire.v1.Operator.
  template <typename Reply, typename Request>
  absl::StatusOr<Reply> Call(const std::string& method, const Request& request) const {
    absl::StatusOr<std::string> bytes = CallBytes(method, request.SerializeAsString());
    if (!bytes.ok()) return bytes.status();
    Reply reply;
    if (!reply.ParseFromString(*bytes)) {
      return absl::InternalError(absl::StrFormat("%s: the answer of %s cannot be parsed", address_, method));
    }
    return reply;
  }
  // The same of serialized messages.
  absl::StatusOr<std::string> CallBytes(const std::string& method, std::string request) const;
  const std::string& address() const { return address_; }

 private:
  std::string address_;
  int64_t timeout_ms_ = 0;
  std::shared_ptr<transport::Channel> channel_;
};

}  // namespace gradwire::client

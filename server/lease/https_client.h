// One HTTPS request at a time, each on a connection of its own, with a deadline and a bound on the answer.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace gradwire {

struct HttpsRequest {
  std::string method;  // "GET", "POST", "PUT"
  std::string target;  // "/path"
  std::string bearer;  // the token of its Authorization
  std::string body;    // JSON; empty: none
};

struct HttpsReply {
  unsigned status = 0;
  std::string body;
  int64_t retry_after_s = 0;  // 0: nothing was said of it
};

// Thread-compatible. TLS 1.2 and later; the server's certificate must be signed by ca_file, which is read for every
// request, and name `host`.
class HttpsClient {
 public:
  static constexpr uint64_t kMaxBodyBytes = 256u << 10;
  static constexpr uint32_t kMaxHeaderBytes = 16u << 10;

  // `host`: a name or an address, IPv6 without its brackets. A name is looked up by the system's resolver for every
  // request; where that is slow to give up, so is the call.
  HttpsClient(std::string host, uint16_t port, std::string ca_file);

  // Whatever the server answers. Errors: Unavailable (no connection, no trust in the server; says why),
  // DeadlineExceeded, DataLoss (not HTTP, or an answer that is too long), FailedPrecondition (ca_file).
  absl::StatusOr<HttpsReply> Call(const HttpsRequest& request, int64_t timeout_ms) const;

 private:
  const std::string host_;
  const uint16_t port_;
  const std::string ca_file_;
};

}  // namespace gradwire

// Where a Lease of Kubernetes is, and how its API server is reached: from a lease address, and inside a pod from what
// Kubernetes gives it.
//
//   kubernetes://NAMESPACE/NAME[?server=https://HOST:PORT&token-file=PATH&ca-file=PATH]
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace gradwire {

struct KubernetesAddress {
  std::string space;  // namespace
  std::string name;
  std::string host;  // of the API server; IPv6 without its brackets
  uint16_t port = 0;
  std::string token_file;  // read for every request: it is replaced from time to time
  std::string ca_file;
};

inline constexpr std::string_view kKubernetesScheme = "kubernetes://";

// What the text does not say is as in a pod: the server of KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT, and the
// namespace (where it is empty), token and ca.crt of the service account. InvalidArgument says what is wrong or
// missing.
absl::StatusOr<KubernetesAddress> ParseKubernetesAddress(std::string_view text);

}  // namespace gradwire

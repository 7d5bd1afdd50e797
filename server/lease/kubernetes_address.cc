// See kubernetes_address.h.
#include "server/lease/kubernetes_address.h"

#include <algorithm>
#include <fstream>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/base/status_macros.h"
#include "common/config/environment.h"
#include "common/transport/address.h"

namespace gradwire {
namespace {

constexpr char kServiceAccount[] = "/var/run/secrets/kubernetes.io/serviceaccount";
constexpr std::string_view kHttps = "https://";
constexpr size_t kMaxNamespace = 63;
constexpr size_t kMaxName = 253;

absl::Status Wrong(std::string_view text, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat(
      "lease \"", std::string(text), "\": ", why,
      "; use for example kubernetes://training/gradwire-shard-0, another name for each shard, outside of a "
      "pod with ?server=https://HOST:PORT&token-file=PATH&ca-file=PATH"));
}

// What Kubernetes takes as a name: a DNS subdomain; without dots a label.
bool IsName(std::string_view name, size_t most, bool dots) {
  const auto plain = [](char c) { return absl::ascii_islower(c) || absl::ascii_isdigit(c); };
  return !name.empty() && name.size() <= most && plain(name.front()) && plain(name.back()) &&
         std::all_of(name.begin(), name.end(), [&](char c) { return plain(c) || c == '-' || (dots && c == '.'); });
}

std::string FromPod(const char* file) {
  std::ifstream in(absl::StrCat(kServiceAccount, "/", file));
  std::string word;
  in >> word;
  return word;
}

absl::Status SetServer(std::string_view host_and_port, KubernetesAddress* address) {
  // The rules of host and port are the same for every network.
  GW_ASSIGN_OR_RETURN(const auto parsed, transport::ParseAddress(absl::StrCat("grpc://", std::string(host_and_port))));
  address->host = parsed.host;
  address->port = parsed.port;
  return absl::OkStatus();
}

std::string ServerOfPod() {
  const std::string host = EnvironmentVariable("KUBERNETES_SERVICE_HOST");
  const std::string port = EnvironmentVariable("KUBERNETES_SERVICE_PORT");
  if (host.empty() || port.empty()) return "";
  return host.find(':') == std::string::npos ? absl::StrCat(host, ":", port) : absl::StrCat("[", host, "]:", port);
}

}  // namespace

absl::StatusOr<KubernetesAddress> ParseKubernetesAddress(std::string_view text) {
  KubernetesAddress address;
  std::string_view rest = text.substr(std::min(text.size(), kKubernetesScheme.size()));
  std::string_view settings;
  if (const size_t mark = rest.find('?'); mark != std::string_view::npos) {
    settings = rest.substr(mark + 1);
    rest = rest.substr(0, mark);
  }
  const size_t slash = rest.find('/');
  if (slash == std::string_view::npos) return Wrong(text, "it is not kubernetes://NAMESPACE/NAME");
  address.space = std::string(rest.substr(0, slash));
  address.name = std::string(rest.substr(slash + 1));
  address.token_file = absl::StrCat(kServiceAccount, "/token");
  address.ca_file = absl::StrCat(kServiceAccount, "/ca.crt");
  std::string server = ServerOfPod();
  for (const std::string& setting : std::vector<std::string>(
           absl::StrSplit(absl::string_view(settings.data(), settings.size()), '&', absl::SkipEmpty()))) {
    const size_t equals = setting.find('=');
    const std::string key = setting.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : setting.substr(equals + 1);
    if (value.empty()) return Wrong(text, absl::StrCat("'", setting, "' has no value"));
    if (key == "token-file") {
      address.token_file = value;
    } else if (key == "ca-file") {
      address.ca_file = value;
    } else if (key == "server" && value.starts_with(kHttps)) {
      server = value.substr(kHttps.size());
    } else {
      return Wrong(text, absl::StrCat("'", setting, "' is not known"));
    }
  }
  if (address.space.empty()) address.space = FromPod("namespace");
  if (address.space.empty()) return Wrong(text, "there is no namespace, and this is no pod that would say its own");
  if (!IsName(address.space, kMaxNamespace, /*dots=*/false)) {
    return Wrong(text, absl::StrCat("'", address.space, "' is no name of a namespace"));
  }
  if (!IsName(address.name, kMaxName, /*dots=*/true)) {
    return Wrong(text, absl::StrCat("'", address.name, "' is no name of a Lease (small letters, digits, '-' and '.')"));
  }
  if (server.empty())
    return Wrong(text, "this is no pod (KUBERNETES_SERVICE_HOST is not set), so it must name the server");
  const absl::Status set = SetServer(server, &address);
  if (!set.ok() || address.port == 0) return Wrong(text, absl::StrCat("'", server, "' is not HOST:PORT"));
  return address;
}

}  // namespace gradwire

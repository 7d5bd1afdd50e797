// The switch by scheme; see lease.h.
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/transport/foreign.h"
#include "server/lease/etcd_lease.h"
#include "server/lease/kubernetes_address.h"
#include "server/lease/kubernetes_lease.h"
#include "server/lease/lease.h"

namespace gradwire {
namespace {

constexpr std::string_view kEtcd = "etcd://";

struct Parsed {
  std::string address;
  std::string key;
};

uint64_t RandomIncarnation() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

absl::StatusOr<Parsed> ParseEtcd(std::string_view text) {
  const size_t slash = text.starts_with(kEtcd) ? text.find('/', kEtcd.size()) : std::string_view::npos;
  if (slash == std::string_view::npos || slash == kEtcd.size() || slash + 1 == text.size()) {
    return absl::InvalidArgumentError(absl::StrCat("lease \"", std::string(text),
                                                   "\" is not etcd://HOST:PORT/KEY or kubernetes://NAMESPACE/NAME; use "
                                                   "for example etcd://etcd:2379/gradwire/shard-0, another key for "
                                                   "each shard"));
  }
  return Parsed{absl::StrCat("grpc://", std::string(text.substr(kEtcd.size(), slash - kEtcd.size()))),
                std::string(text.substr(slash + 1))};
}

}  // namespace

absl::Status CheckLeaseAddress(std::string_view text) {
  if (text.starts_with(kKubernetesScheme)) return ParseKubernetesAddress(text).status();
  GW_ASSIGN_OR_RETURN(const Parsed parsed, ParseEtcd(text));
  return transport::DialForeign(parsed.address).status();
}

absl::StatusOr<std::unique_ptr<Lease>> MakeLease(std::string_view text, const LeaseOptions& options, Clock* clock) {
  if (text.starts_with(kKubernetesScheme)) {
    GW_ASSIGN_OR_RETURN(KubernetesAddress where, ParseKubernetesAddress(text));
    return std::make_unique<KubernetesLease>(std::move(where), options, RandomIncarnation(), clock);
  }
  GW_ASSIGN_OR_RETURN(Parsed parsed, ParseEtcd(text));
  GW_ASSIGN_OR_RETURN(std::shared_ptr<transport::Channel> channel, transport::DialForeign(parsed.address));
  return std::make_unique<EtcdLease>(std::move(channel), std::move(parsed.key), options, clock);
}

}  // namespace gradwire

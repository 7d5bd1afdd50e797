// Dial and Listen: the one place that knows every transport.
#include "common/base/status_macros.h"
#include "common/transport/address.h"
#include "common/transport/asio/tcp_transport.h"
#include "common/transport/grpc/grpc_transport.h"
#include "common/transport/inproc/inproc.h"
#include "common/transport/transport.h"

namespace gradwire::transport {

absl::StatusOr<std::shared_ptr<Channel>> Dial(std::string_view text, const Limits& limits) {
  GW_ASSIGN_OR_RETURN(Address address, ParseAddress(text));
  if (address.scheme == Scheme::kInproc) return DialInproc(ProcessInprocRegistry(), address, limits);
  const bool has_port = address.scheme == Scheme::kGrpc || address.scheme == Scheme::kTcp;
  if (has_port && address.port == 0)
    return absl::InvalidArgumentError("port 0 can be listened on, not dialled; use the port the listener printed");
  if (address.scheme == Scheme::kTcp) return DialTcp(address, limits);
  return DialGrpc(address, limits);
}

absl::StatusOr<std::unique_ptr<Listener>> Listen(std::string_view text, Service* service, const Limits& limits) {
  GW_ASSIGN_OR_RETURN(Address address, ParseAddress(text));
  if (address.scheme == Scheme::kInproc) return ListenInproc(ProcessInprocRegistry(), address, service, limits);
  if (address.scheme == Scheme::kTcp) return ListenTcp(address, service, limits);
  return ListenGrpc(address, service, limits);
}

}  // namespace gradwire::transport

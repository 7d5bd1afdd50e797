// Dial and Listen: the one place that knows every transport.
#include "common/base/status_macros.h"
#include "common/transport/address.h"
#include "common/transport/asio/tcp_transport.h"
#include "common/transport/caps.h"
#include "common/transport/catch_exhausted.h"
#include "common/transport/foreign.h"
#include "common/transport/grpc/grpc_transport.h"
#include "common/transport/inproc/inproc.h"
#include "common/transport/transport.h"

namespace gradwire::transport {
namespace {

Address InThisProcess(const Address& address) {
  Address here;
  here.scheme = Scheme::kInproc;
  here.name = address.scheme == Scheme::kInproc ? address.name : address.ToString();
  return here;
}

}  // namespace

absl::StatusOr<std::shared_ptr<Channel>> Dial(std::string_view text, const Limits& limits) {
  GW_ASSIGN_OR_RETURN(Address address, ParseAddress(text));
  if (!address.host.empty() && address.port == 0)
    return absl::InvalidArgumentError("port 0 can be listened on, not dialled; use the port the listener printed");
  if (const Address here = InThisProcess(address); ProcessInprocRegistry().Find(here.name) != nullptr) address = here;
  return CatchExhausted("a channel", [&]() -> absl::StatusOr<std::shared_ptr<Channel>> {
    if (address.scheme == Scheme::kInproc) return DialInproc(ProcessInprocRegistry(), address, limits);
    if (address.scheme == Scheme::kTcp) return DialTcp(address, limits);
    return DialGrpc(address, limits, /*checks=*/true);
  });
}

absl::StatusOr<std::shared_ptr<Channel>> DialForeign(std::string_view text, const Limits& limits) {
  GW_ASSIGN_OR_RETURN(Address address, ParseAddress(text));
  if (address.scheme != Scheme::kGrpc && address.scheme != Scheme::kUnix)
    return absl::InvalidArgumentError("a gRPC server is dialled by grpc://host:port or unix:///path");
  return CatchExhausted("a channel", [&] { return DialGrpc(address, limits, /*checks=*/false); });
}

absl::StatusOr<std::unique_ptr<Listener>> Listen(std::string_view text, Service* service, const Limits& limits) {
  return ListenWithin(text, service, limits, {});
}

absl::StatusOr<std::unique_ptr<Listener>> ListenWithin(std::string_view text, Service* service, const Limits& limits,
                                                       const Caps& caps) {
  GW_ASSIGN_OR_RETURN(Address address, ParseAddress(text));
  return CatchExhausted("a listener", [&]() -> absl::StatusOr<std::unique_ptr<Listener>> {
    if (address.scheme == Scheme::kInproc) return ListenInproc(ProcessInprocRegistry(), address, service, limits);
    if (address.scheme == Scheme::kTcp) return ListenTcp(address, service, limits, caps);
    return ListenGrpc(address, service, limits, caps);
  });
}

absl::StatusOr<std::unique_ptr<Listener>> ListenInProcess(std::string_view text, Service* service,
                                                          const Limits& limits) {
  GW_ASSIGN_OR_RETURN(Address address, ParseAddress(text));
  return ListenInproc(ProcessInprocRegistry(), InThisProcess(address), service, limits);
}

}  // namespace gradwire::transport

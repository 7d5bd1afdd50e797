// Dial and Listen: the one place that knows every transport.
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
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

absl::StatusOr<std::shared_ptr<Channel>> DialNetwork(const Address& address, const Limits& limits) {
  if (address.scheme == Scheme::kTcp) return DialTcp(address, limits);
  return DialGrpc(address, limits, /*checks=*/true);
}

// To who listens in this process, and where nobody does any more over the network to who has come in its place.
class NearChannel final : public Channel {
 public:
  NearChannel(const Address& address, const Limits& limits, std::shared_ptr<Channel> here)
      : address_(address), limits_(limits), here_(std::move(here)) {}

  absl::StatusOr<std::string> Call(Method method, std::string request, int64_t timeout_ms) override {
    GW_ASSIGN_OR_RETURN(Channel* const channel, Way());
    return channel->Call(method, std::move(request), timeout_ms);
  }
  absl::StatusOr<std::unique_ptr<Stream>> Open(Method method, StreamSink* sink) override {
    GW_ASSIGN_OR_RETURN(Channel* const channel, Way());
    return channel->Open(method, sink);
  }
  bool Poll() override {
    const std::shared_ptr<Channel> away = Away();
    return away != nullptr && away->Poll();
  }
  void StopPolling() override {
    if (const std::shared_ptr<Channel> away = Away()) away->StopPolling();
  }

 private:
  std::shared_ptr<Channel> Away() {
    absl::MutexLock lock(&mu_);
    return away_;
  }
  // Lives as long as this.
  absl::StatusOr<Channel*> Way() {
    if (ProcessInprocRegistry().Find(InThisProcess(address_).name) != nullptr) return here_.get();
    absl::MutexLock lock(&mu_);
    if (away_ == nullptr) {
      GW_ASSIGN_OR_RETURN(away_, CatchExhausted("a channel", [this] { return DialNetwork(address_, limits_); }));
    }
    return away_.get();
  }

  const Address address_;
  const Limits limits_;
  const std::shared_ptr<Channel> here_;
  absl::Mutex mu_;
  std::shared_ptr<Channel> away_ ABSL_GUARDED_BY(mu_);  // null until it is needed
};

}  // namespace

absl::StatusOr<std::shared_ptr<Channel>> Dial(std::string_view text, const Limits& limits) {
  GW_ASSIGN_OR_RETURN(Address address, ParseAddress(text));
  if (!address.host.empty() && address.port == 0)
    return absl::InvalidArgumentError("port 0 can be listened on, not dialled; use the port the listener printed");
  return CatchExhausted("a channel", [&]() -> absl::StatusOr<std::shared_ptr<Channel>> {
    if (address.scheme == Scheme::kInproc) return DialInproc(ProcessInprocRegistry(), address, limits);
    const Address near = InThisProcess(address);
    if (ProcessInprocRegistry().Find(near.name) == nullptr) return DialNetwork(address, limits);
    GW_ASSIGN_OR_RETURN(std::shared_ptr<Channel> here, DialInproc(ProcessInprocRegistry(), near, limits));
    return std::make_shared<NearChannel>(address, limits, std::move(here));
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
  return CatchExhausted("a listener",
                        [&] { return ListenInproc(ProcessInprocRegistry(), InThisProcess(address), service, limits); });
}

}  // namespace gradwire::transport

// The server end of the plain TCP transport: accepts connections, within limits, and ends them when it goes.
#include <fcntl.h>

#include <algorithm>
#include <boost/asio/ip/v6_only.hpp>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "common/base/clock.h"
#include "common/base/status_macros.h"
#include "common/transport/asio/resolve.h"
#include "common/transport/asio/server.h"
#include "common/transport/asio/tcp_transport.h"
#include "common/transport/asio/timer.h"
#include "common/transport/catch_exhausted.h"
#include "common/transport/poller.h"
#include "common/transport/ticker.h"
#include "common/transport/warning_clock.h"

namespace gradwire::transport {
namespace tcp {
namespace {

constexpr TimeNs kNsPerUs = 1000;
// Peers have so long to take the last words of a listener that goes.
constexpr absl::Duration kShutdownGrace = absl::Milliseconds(500);

class TcpListener final : public Listener, public ServerOwner {
 public:
  TcpListener(Service* service, const Limits& limits, const Caps& caps)
      : service_(service),
        endpoint_{limits, caps},
        acceptor_(endpoint_.queue->context()),
        accepted_(endpoint_.queue->context()),
        accept_(this, &TcpListener::OnAccept) {}
  ~TcpListener() override;

  absl::Status Start(const Address& address);
  std::string address() const override { return address_; }
  void SetServing(bool) override {}

 private:
  void OnAccept(error_code error, size_t);
  // Of the socket that was accepted; null where there is no memory.
  std::shared_ptr<ServerConnection> Take() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Warn(const std::string& what) ABSL_LOCKS_EXCLUDED(mu_);
  // Waits for the next connection, if there is room for it.
  void AcceptNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Tick();
  std::vector<std::shared_ptr<ServerConnection>> Connections() ABSL_LOCKS_EXCLUDED(mu_);
  bool NoneOpen() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return open_ == 0 && !accepting_; }
  bool Empty() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return connections_.empty() && !accepting_; }

  // One more than there may be: cuts off the one that has been idle for longest. False: none is.
  bool MakeRoom() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  size_t Standing() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return connections_.size() - cut_.size(); }

  void Opened() override;
  bool StreamOpened() override;
  void Closed(bool opened, bool stream) override;
  void Ended(Connection* connection) override;
  void Reclaim() override;

  Service* const service_;
  const Endpoint endpoint_;
  std::string address_;
  std::unique_ptr<Poller> poller_;
  std::unique_ptr<Ticker<Timer>> ticker_;

  absl::Mutex mu_;
  asio::ip::tcp::acceptor acceptor_ ABSL_GUARDED_BY(mu_);
  asio::ip::tcp::socket accepted_;  // of the accept under way
  Operation<TcpListener> accept_;
  bool accepting_ ABSL_GUARDED_BY(mu_) = false;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  int unopened_ ABSL_GUARDED_BY(mu_) = 0;  // connections that have not said what they want
  int open_ ABSL_GUARDED_BY(mu_) = 0;      // connections that may use the service
  int streams_ ABSL_GUARDED_BY(mu_) = 0;
  std::unordered_set<Connection*> cut_ ABSL_GUARDED_BY(mu_);  // those that made room, and will end soon
  WarningClock warnings_;
  std::unordered_map<Connection*, std::shared_ptr<ServerConnection>> connections_ ABSL_GUARDED_BY(mu_);
};

absl::Status TcpListener::Start(const Address& address) {
  const auto cannot = [&](const error_code& error) {
    const std::string why = error == asio::error::address_in_use ? "address in use" : error.message();
    return absl::UnavailableError(absl::StrCat("cannot listen on ", address.ToString(), ": ", why,
                                               "; choose another address or stop what holds it"));
  };
  GW_ASSIGN_OR_RETURN(const auto endpoints, Resolve(address, /*passive=*/true));
  {
    absl::MutexLock lock(&mu_);
    error_code error;
    acceptor_.open(endpoints[0].protocol(), error);
    if (!error) acceptor_.set_option(asio::ip::tcp::acceptor::reuse_address(true), error);
    if (!error && endpoints[0].address().is_v6()) acceptor_.set_option(asio::ip::v6_only(false), error);
    if (!error) acceptor_.bind(endpoints[0], error);
    if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
    if (error) return cannot(error);
    (void)fcntl(acceptor_.native_handle(), F_SETFD, FD_CLOEXEC);
    Address bound = address;
    bound.port = acceptor_.local_endpoint(error).port();
    address_ = bound.ToString();
  }
  poller_ = std::make_unique<Poller>(endpoint_.queue.get(), endpoint_.limits.spin_us * kNsPerUs);
  ticker_ = std::make_unique<Ticker<Timer>>(
      endpoint_.queue.get(), std::max<int64_t>(endpoint_.limits.keepalive_ms / 2, 1), [this] { Tick(); });
  absl::MutexLock lock(&mu_);
  AcceptNext();
  return absl::OkStatus();
}

TcpListener::~TcpListener() {
  if (poller_ == nullptr) return;
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
    error_code ignored;
    acceptor_.close(ignored);
  }
  for (const auto& connection : Connections()) connection->Stop();
  {
    absl::MutexLock lock(&mu_);
    mu_.AwaitWithTimeout(absl::Condition(this, &TcpListener::NoneOpen), kShutdownGrace);
  }
  for (const auto& connection : Connections()) connection->Kill();
  {
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(this, &TcpListener::Empty));
  }
  ticker_->Stop();
  poller_.reset();
}

void TcpListener::AcceptNext() {
  if (stopping_ || accepting_ || unopened_ >= endpoint_.caps.max_handshakes) return;
  // Where there is no memory for it, the next tick tries again.
  accepting_ = CatchExhausted("a connection", [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
                 acceptor_.async_accept(accepted_, IoQueue::Handler(&accept_));
                 return absl::OkStatus();
               }).ok();
}

void TcpListener::OnAccept(error_code error, size_t) {
  std::shared_ptr<ServerConnection> connection;
  std::optional<asio::ip::tcp::socket> refused;  // closed once it was told
  {
    absl::MutexLock lock(&mu_);
    if (!error && !stopping_) {
      const auto most = static_cast<size_t>(endpoint_.caps.max_connections);
      if (Standing() >= most && !MakeRoom()) {
        refused.emplace(std::move(accepted_));
      } else {
        connection = Take();
      }
    }
    error_code ignored;
    if (connection == nullptr && !error) accepted_.close(ignored);
    accepting_ = false;
    // After an error, most likely for want of descriptors, the next tick tries again.
    if (!error) AcceptNext();
  }
  if (connection != nullptr) connection->Start();
  if (refused) {
    Warn(absl::StrCat(address_, ": a connection was refused: ", endpoint_.caps.max_connections,
                      " are in use, as many as there may be (--max-connections)"));
  }
  if (error && error != asio::error::operation_aborted)
    Warn(absl::StrCat(address_, ": a connection could not be accepted: ", error.message(), "; it is tried again"));
}

std::shared_ptr<ServerConnection> TcpListener::Take() {
  std::shared_ptr<ServerConnection> connection;
  CatchExhausted("a connection", [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    Prepare(accepted_);
    connection = std::make_shared<ServerConnection>(endpoint_, this, service_, std::move(accepted_));
    connections_.emplace(connection.get(), connection);
    return absl::OkStatus();
  }).IgnoreError();
  if (connection == nullptr || !connections_.contains(connection.get())) return nullptr;
  ++open_;
  ++unopened_;
  return connection;
}

bool TcpListener::MakeRoom() {
  ServerConnection* idlest = nullptr;
  for (const auto& [key, connection] : connections_) {
    if (connection->idle() && (idlest == nullptr || connection->used() < idlest->used())) idlest = connection.get();
  }
  if (idlest == nullptr || !idlest->Kill()) return false;
  cut_.insert(idlest);
  return true;
}

void TcpListener::Warn(const std::string& what) {
  if (endpoint_.caps.warn && warnings_.Admit(SteadyClock().Now())) endpoint_.caps.warn(what);
}

void TcpListener::Reclaim() {
  std::shared_ptr<ServerConnection> first;
  {
    absl::MutexLock lock(&mu_);
    size_t held = 0;  // by those that stay
    for (const auto& [key, connection] : connections_) {
      if (connection->killed() || connection->turn() == 0) continue;
      held += connection->held_bytes();
      if (first == nullptr || connection->turn() < first->turn()) first = connection;
    }
    if (held <= endpoint_.caps.receive_bytes || first == nullptr) return;
    if (first->Kill()) cut_.insert(first.get());
  }
  Warn(absl::StrCat(address_, ": messages that have come in part take ", endpoint_.caps.receive_bytes,
                    " bytes, as many as they may (--receive-limit-bytes): the one that began first was dropped"));
}

void TcpListener::Tick() {
  for (const auto& connection : Connections()) connection->Tick();
  absl::MutexLock lock(&mu_);
  AcceptNext();
}

std::vector<std::shared_ptr<ServerConnection>> TcpListener::Connections() {
  absl::MutexLock lock(&mu_);
  std::vector<std::shared_ptr<ServerConnection>> connections;
  for (const auto& [key, connection] : connections_) connections.push_back(connection);
  return connections;
}

void TcpListener::Opened() {
  absl::MutexLock lock(&mu_);
  --unopened_;
  AcceptNext();
}

bool TcpListener::StreamOpened() {
  {
    absl::MutexLock lock(&mu_);
    if (streams_ < endpoint_.caps.max_streams) return ++streams_, true;
  }
  Warn(absl::StrCat(address_, ": a stream was refused: ", endpoint_.caps.max_streams,
                    " are open, as many as there may be (--max-streams)"));
  return false;
}

void TcpListener::Closed(bool opened, bool stream) {
  absl::MutexLock lock(&mu_);
  --open_;
  if (!opened) --unopened_;
  if (stream) --streams_;
}

void TcpListener::Ended(Connection* connection) {
  std::shared_ptr<ServerConnection> last;  // freed without the lock
  absl::MutexLock lock(&mu_);
  const auto it = connections_.find(connection);
  last = std::move(it->second);
  connections_.erase(it);
  cut_.erase(connection);
  AcceptNext();
}

}  // namespace
}  // namespace tcp

absl::StatusOr<std::unique_ptr<Listener>> ListenTcp(const Address& address, Service* service, const Limits& limits,
                                                    const Caps& caps) {
  auto listener = std::make_unique<tcp::TcpListener>(service, limits, caps);
  absl::Status started = listener->Start(address);
  if (!started.ok()) return started;
  return listener;
}

}  // namespace gradwire::transport

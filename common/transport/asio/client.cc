// The client end of the plain TCP transport.
#include <algorithm>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/transport/asio/caller.h"
#include "common/transport/asio/connection.h"
#include "common/transport/asio/resolve.h"
#include "common/transport/asio/tcp_transport.h"
#include "common/transport/asio/timer.h"
#include "common/transport/catch_exhausted.h"
#include "common/transport/poller.h"
#include "common/transport/stream_handle.h"
#include "common/transport/ticker.h"

namespace gradwire::transport {
namespace tcp {
namespace {

class ClientStream final : public Connection {
 public:
  ClientStream(const Endpoint& endpoint, ConnectionOwner* owner, StreamSink* sink, std::string peer)
      : Connection(Side::kClient, endpoint, owner, asio::ip::tcp::socket(endpoint.queue->context()), std::move(peer)),
        connected_(this, &ClientStream::OnConnected) {
    set_sink(sink);
  }

  void Start(std::vector<asio::ip::tcp::endpoint> endpoints, std::string method) {
    endpoints_ = std::move(endpoints);
    Outgoing open = Pack(PacketType::kOpen, absl::StatusCode::kOk, {std::move(method), {}});
    const auto preface = StorePreface();
    open.head.insert(0, reinterpret_cast<const char*>(preface.data()), preface.size());
    Enqueue(std::move(open));
    ConnectNext();
  }

 private:
  void ConnectNext() {
    absl::MutexLock lock(&mu_);
    const asio::ip::tcp::endpoint& endpoint = endpoints_[next_++];
    error_code error;
    socket_.close(error);
    socket_.open(endpoint.protocol(), error);  // if it fails, so does the connect
    Prepare(socket_);
    socket_.async_connect(endpoint, IoQueue::Handler(&connected_));
  }

  void OnConnected(error_code error, size_t) {
    const std::shared_ptr<Connection> self = shared_from_this();
    bool is_cut = false;
    {
      absl::MutexLock lock(&mu_);
      is_cut = cut();
    }
    std::string why = error.message();
    if (error && !is_cut && next_ < endpoints_.size()) {
      const absl::Status connects = CatchExhausted("connecting", [this] {
        ConnectNext();
        return absl::OkStatus();
      });
      if (connects.ok()) return;
      why = std::string(connects.message());
    }
    if (error || is_cut) {
      ReadEnded(why);
    } else {
      Established(kLostTicks, /*give=*/true);
      ReadMore();
    }
    Pump();
  }

  absl::Status OnPacket(Packet packet) override {
    switch (packet.header.type) {
      case PacketType::kMessage:
        Deliver({std::move(packet.control), std::move(packet.body)});
        return absl::OkStatus();
      case PacketType::kStatus:
        End(absl::Status(packet.header.code, packet.control));
        return absl::OkStatus();
      case PacketType::kAlive:
        return absl::OkStatus();
      default:
        return absl::InternalError(
            absl::StrCat("the server sent a packet of type ", static_cast<int>(packet.header.type), " on a stream"));
    }
  }

  Operation<ClientStream> connected_;
  std::vector<asio::ip::tcp::endpoint> endpoints_;
  size_t next_ = 0;
};

class TcpChannel final : public Channel, public ConnectionOwner {
 public:
  TcpChannel(const Address& address, const Limits& limits)
      : address_(address),
        endpoint_{limits},
        caller_(address, limits, endpoint_.pool),
        poller_(std::make_unique<Poller>(endpoint_.queue.get(), 0)),
        ticker_(endpoint_.queue.get(), std::max<int64_t>(limits.keepalive_ms / 2, 1), [this] { Tick(); }) {}

  ~TcpChannel() override {
    for (const auto& stream : Streams()) stream->Cancel();
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(this, &TcpChannel::Empty));
    }
    ticker_.Stop();
    poller_.reset();
  }

  absl::StatusOr<std::string> Call(Method method, std::string request, int64_t timeout_ms) override {
    return caller_.Call(method, std::move(request), timeout_ms);
  }

  absl::StatusOr<std::unique_ptr<Stream>> Open(Method method, StreamSink* sink) override {
    GW_ASSIGN_OR_RETURN(auto endpoints, Resolve(address_, /*passive=*/false));
    auto stream = std::make_shared<ClientStream>(endpoint_, this, sink, address_.ToString());
    {
      absl::MutexLock lock(&mu_);
      streams_.emplace(stream.get(), stream);
    }
    const absl::Status started = CatchExhausted("a stream", [&] {
      stream->Start(std::move(endpoints), std::string(method));
      return absl::OkStatus();
    });
    if (!started.ok()) {  // nothing of it is under way
      Ended(stream.get());
      return started;
    }
    return std::make_unique<StreamHandle<Connection>>(std::move(stream), /*abandon=*/true);
  }

  bool Poll() override {
    poller_->RunReady();
    return true;
  }
  void StopPolling() override { poller_->HandBack(); }

 private:
  bool Empty() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return streams_.empty(); }
  std::vector<std::shared_ptr<Connection>> Streams() ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    std::vector<std::shared_ptr<Connection>> streams;
    for (const auto& [key, stream] : streams_) streams.push_back(stream);
    return streams;
  }
  void Tick() {
    for (const auto& stream : Streams()) stream->Tick();
  }
  void Ended(Connection* connection) override {
    std::shared_ptr<Connection> last;  // freed without the lock
    absl::MutexLock lock(&mu_);
    const auto it = streams_.find(connection);
    last = std::move(it->second);
    streams_.erase(it);
  }

  const Address address_;
  const Endpoint endpoint_;
  Caller caller_;
  absl::Mutex mu_;
  std::unordered_map<Connection*, std::shared_ptr<Connection>> streams_ ABSL_GUARDED_BY(mu_);
  // Last: their threads use the others.
  std::unique_ptr<Poller> poller_;
  Ticker<Timer> ticker_;
};

}  // namespace
}  // namespace tcp

absl::StatusOr<std::shared_ptr<Channel>> DialTcp(const Address& address, const Limits& limits) {
  return std::make_shared<tcp::TcpChannel>(address, limits);
}

}  // namespace gradwire::transport

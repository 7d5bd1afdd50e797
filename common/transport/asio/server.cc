// See server.h.
#include "common/transport/asio/server.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/transport/sink_scope.h"
#include "common/transport/stream_handle.h"

namespace gradwire::transport::tcp {
namespace {

constexpr int64_t kIdleCallsMs = 600'000;  // a connection without calls is closed

absl::Status ShuttingDown() {
  return absl::UnavailableError("the server is shutting down; retry, its replacement may be starting");
}

}  // namespace

ServerConnection::ServerConnection(const Endpoint& endpoint, ServerOwner* owner, Service* service,
                                   asio::ip::tcp::socket socket)
    : Connection(Side::kServer, endpoint, owner, std::move(socket), "a client"), owner_(owner), service_(service) {}

void ServerConnection::OnPreface() {
  const auto preface = StorePreface();
  Enqueue({std::string(reinterpret_cast<const char*>(preface.data()), preface.size()), {}});
}

void ServerConnection::OnBadInput(const absl::Status& status) {
  if (!reader_.has_preface()) {
    const auto preface = StorePreface();
    const std::string_view other_version(reinterpret_cast<const char*>(preface.data()), preface.size());
    const bool stranger =
        reader_.head().size() < kPrefaceBytes || !std::equal(kMagic.begin(), kMagic.end(), reader_.head().begin());
    Farewell(LooksLikeHttp2(reader_.head()) ? Http2GoAway() : stranger ? std::string() : std::string(other_version));
  }
  Abort(status);
}

absl::Status ServerConnection::OnPacket(Packet packet) {
  const PacketType type = packet.header.type;
  if (use_ != Use::kStream && type == PacketType::kCall) {
    Call(packet);
  } else if (use_ == Use::kNone && type == PacketType::kOpen) {
    Open(packet);
  } else if (use_ == Use::kStream && type == PacketType::kMessage) {
    Deliver({std::move(packet.control), std::move(packet.body)});
  } else if (use_ == Use::kStream && type == PacketType::kHalfClose) {
    Finish(absl::OkStatus());
  } else if (use_ != Use::kStream || type != PacketType::kAlive) {
    return absl::InvalidArgumentError(absl::StrCat("a packet of type ", static_cast<int>(type), " out of place"));
  }
  return absl::OkStatus();
}

void ServerConnection::Begin(int lost_ticks, bool give) {
  Established(lost_ticks, give);
  bool first = false;
  {
    absl::MutexLock lock(&mu_);
    first = !std::exchange(opened_, true);
  }
  if (first) owner_->Opened();
}

void ServerConnection::Open(const Packet& packet) {
  use_ = Use::kStream;
  busy_.store(true, std::memory_order_relaxed);
  Begin(kLostTicks, /*give=*/true);
  counted_ = owner_->StreamOpened();
  if (!counted_) {
    return Abort(absl::ResourceExhaustedError(
        "this server has as many streams open as it may have (--max-streams): end others, or try later"));
  }
  bool stopping = false;
  {
    absl::MutexLock lock(&mu_);
    stopping = stopping_;
  }
  if (stopping) return Abort(ShuttingDown());
  handle_ = std::make_shared<StreamHandle<Connection>>(shared_from_this(), /*abandon=*/false);
  const SinkScope scope(this);
  absl::StatusOr<std::unique_ptr<StreamSink>> sink = service_->Accept(packet.control, handle_);
  if (!sink.ok()) return Abort(sink.status());
  sink_ = *std::move(sink);
  set_sink(sink_.get());
}

void ServerConnection::Call(const Packet& packet) {
  use_ = Use::kCalls;
  busy_.store(true, std::memory_order_relaxed);
  const int64_t idle_ticks = 2 * kIdleCallsMs / std::max<int64_t>(endpoint_.limits.keepalive_ms, 1);
  Begin(static_cast<int>(std::max<int64_t>(idle_ticks, kLostTicks)), /*give=*/false);
  bool stopping = false;
  {
    absl::MutexLock lock(&mu_);
    stopping = stopping_;
    in_call_ = true;
  }
  std::string joined;
  for (const Bytes& slice : packet.body) joined.append(reinterpret_cast<const char*>(slice.data()), slice.size());
  absl::StatusOr<std::string> reply = stopping ? ShuttingDown() : service_->Call(packet.control, joined);
  const absl::Status status = reply.status();
  Message message;
  if (status.ok()) {
    message.frame.push_back(Bytes::FromString(*std::move(reply)));
  } else {
    message.control = std::string(status.message().substr(0, kMaxControlBytes));
  }
  Enqueue(Pack(PacketType::kReply, status.code(), std::move(message)));
  {
    absl::MutexLock lock(&mu_);
    in_call_ = false;
    used_.store(SteadyClock().Now(), std::memory_order_relaxed);
    busy_.store(false, std::memory_order_relaxed);
    stopping = stopping_;
  }
  if (stopping) Finish(ShuttingDown());
}

void ServerConnection::Stop() {
  bool in_stream = false;
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
    if (in_call_) return;
    in_stream = opened_;
  }
  if (in_stream) return Abort(ShuttingDown());
  Kill();
}

void ServerConnection::OnCoreClosed() {
  sink_.reset();
  handle_.reset();
  bool opened = false;
  {
    absl::MutexLock lock(&mu_);
    opened = opened_;
  }
  owner_->Closed(opened, counted_);
}

}  // namespace gradwire::transport::tcp

// See caller.h.
#include "common/transport/asio/caller.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/clock.h"
#include "common/base/status_macros.h"
#include "common/transport/asio/message_reader.h"
#include "common/transport/asio/resolve.h"
#include "common/transport/asio/tcp_format.h"

namespace gradwire::transport::tcp {
namespace {

constexpr int64_t kNsPerMs = 1'000'000;

absl::Status Errno(std::string_view what, int why) {
  return absl::UnavailableError(absl::StrCat(std::string(what), ": ", std::strerror(why)));
}

absl::Status LostTo(const absl::Status& why) {
  return absl::UnavailableError(absl::StrCat("the connection was lost: ", std::string(why.message())));
}

void SetInt(int fd, int level, int name, int value) { (void)setsockopt(fd, level, name, &value, sizeof(value)); }

}  // namespace

// One socket, used by one thread at a time.
class CallConnection {
 public:
  CallConnection(int fd, std::shared_ptr<BufferPool> pool, const Limits& limits)
      : fd_(fd), reader_(std::move(pool), limits.max_message_bytes) {}
  ~CallConnection() { close(fd_); }
  CallConnection(const CallConnection&) = delete;
  CallConnection& operator=(const CallConnection&) = delete;

  static absl::StatusOr<std::unique_ptr<CallConnection>> To(const boost::asio::ip::tcp::endpoint& endpoint,
                                                            const std::shared_ptr<BufferPool>& pool,
                                                            const Limits& limits, int64_t deadline_ns) {
    const int fd = socket(endpoint.protocol().family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) return Errno("socket", errno);
    auto connection = std::make_unique<CallConnection>(fd, pool, limits);
    SetInt(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    SetInt(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    SetInt(fd, IPPROTO_TCP, TCP_KEEPIDLE, static_cast<int>(std::max<int64_t>(limits.keepalive_ms / 1000, 1)));
    if (connect(fd, endpoint.data(), static_cast<socklen_t>(endpoint.size())) != 0) {
      if (errno != EINPROGRESS) return Errno("connect", errno);
      GW_RETURN_IF_ERROR(connection->Wait(POLLOUT, deadline_ns));
      int why = 0;
      socklen_t size = sizeof(why);
      (void)getsockopt(fd, SOL_SOCKET, SO_ERROR, &why, &size);
      if (why != 0) return Errno("connect", why);
    }
    return connection;
  }

  // Nothing is to be read before a request: what can be read is the connection's end.
  bool Stands() const {
    pollfd poll_fd{fd_, POLLIN, 0};
    return poll(&poll_fd, 1, 0) == 0;
  }
  bool reusable() const { return reusable_; }

  absl::StatusOr<std::string> Call(Method method, const std::string& request, int64_t deadline_ns) {
    reusable_ = false;
    GW_RETURN_IF_ERROR(Write(method, request, deadline_ns));
    for (;;) {
      absl::StatusOr<std::optional<Packet>> next = reader_.Next();
      // Whether the server took the call is not known then, as behind any lost connection.
      if (absl::IsDataLoss(next.status())) return LostTo(next.status());
      GW_RETURN_IF_ERROR(next.status());
      std::optional<Packet>& packet = *next;
      if (!packet) {
        GW_RETURN_IF_ERROR(Read(deadline_ns));
        continue;
      }
      const bool is_reply = packet->header.type == PacketType::kReply;
      if (!is_reply && packet->header.type != PacketType::kStatus)
        return absl::InternalError("the server answered a call with another kind of packet");
      reusable_ = is_reply;
      const absl::Status said(packet->header.code, packet->control);
      if (!is_reply && absl::IsDataLoss(said)) return LostTo(said);  // the request was
      if (!said.ok()) return said;
      if (!is_reply) return absl::UnavailableError("the server ended the connection");
      std::string reply;
      reply.reserve(TotalSize(packet->body));
      for (const Bytes& slice : packet->body) reply.append(reinterpret_cast<const char*>(slice.data()), slice.size());
      return reply;
    }
  }

 private:
  absl::Status Wait(short events, int64_t deadline_ns) {
    const int64_t left_ns = deadline_ns - SteadyClock().Now();
    if (left_ns <= 0) return absl::DeadlineExceededError("");
    pollfd poll_fd{fd_, events, 0};
    const int64_t left_ms = std::min<int64_t>((left_ns + kNsPerMs - 1) / kNsPerMs, INT32_MAX);
    if (poll(&poll_fd, 1, static_cast<int>(left_ms)) < 0 && errno != EINTR) return Errno("poll", errno);
    return absl::OkStatus();
  }

  absl::Status Write(Method method, const std::string& request, int64_t deadline_ns) {
    const auto preface = StorePreface();
    const Bytes body = Bytes::Borrow({reinterpret_cast<const uint8_t*>(request.data()), request.size()});
    const auto header =
        StoreHeader({PacketType::kCall, absl::StatusCode::kOk, static_cast<uint32_t>(method.size()),
                     static_cast<uint32_t>(request.size()), PartsCheck(PacketType::kCall, method, {&body, 1})});
    const std::array<std::string_view, 4> parts = {
        std::string_view(reinterpret_cast<const char*>(preface.data()),
                         std::exchange(greeted_, true) ? 0 : preface.size()),
        std::string_view(reinterpret_cast<const char*>(header.data()), header.size()), method, request};
    std::array<iovec, 4> pieces;
    for (size_t i = 0; i < parts.size(); ++i) pieces[i] = {const_cast<char*>(parts[i].data()), parts[i].size()};
    for (size_t first = 0; first < pieces.size();) {
      msghdr message{};
      message.msg_iov = pieces.data() + first;
      message.msg_iovlen = pieces.size() - first;
      const ssize_t n = sendmsg(fd_, &message, MSG_NOSIGNAL);
      if (n < 0 && errno == EAGAIN) GW_RETURN_IF_ERROR(Wait(POLLOUT, deadline_ns));
      // What the server said before it closed the connection is read all the same.
      if (n < 0 && (errno == EPIPE || errno == ECONNRESET)) return absl::OkStatus();
      if (n < 0 && errno != EAGAIN && errno != EINTR) return Errno("send", errno);
      for (size_t left = n < 0 ? 0 : static_cast<size_t>(n); first < pieces.size(); ++first) {
        const size_t step = std::min(left, pieces[first].iov_len);
        pieces[first].iov_base = static_cast<char*>(pieces[first].iov_base) + step;
        pieces[first].iov_len -= step;
        left -= step;
        if (pieces[first].iov_len != 0) break;
      }
    }
    return absl::OkStatus();
  }

  absl::Status Read(int64_t deadline_ns) {
    const auto space = reader_.Space();
    std::array<iovec, 2> pieces = {{{space[0].data(), space[0].size()}, {space[1].data(), space[1].size()}}};
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = pieces.size();
    const ssize_t n = recvmsg(fd_, &message, 0);
    if (n == 0) return absl::UnavailableError("the server closed the connection");
    if (n > 0) reader_.Filled(static_cast<size_t>(n));
    if (n < 0 && errno == EAGAIN) return Wait(POLLIN, deadline_ns);
    if (n < 0 && errno != EINTR) return Errno("receive", errno);
    return absl::OkStatus();
  }

  const int fd_;
  MessageReader reader_;
  bool greeted_ = false;
  bool reusable_ = true;
};

Caller::Caller(const Address& address, const Limits& limits, std::shared_ptr<BufferPool> pool)
    : address_(address), limits_(limits), pool_(std::move(pool)) {}

Caller::~Caller() = default;

absl::StatusOr<std::unique_ptr<CallConnection>> Caller::Connect(int64_t deadline_ns) {
  for (;;) {
    std::unique_ptr<CallConnection> kept;
    absl::MutexLock lock(&mu_);
    if (idle_.empty()) break;
    kept = std::move(idle_.back());
    idle_.pop_back();
    if (kept->Stands()) return kept;
  }
  GW_ASSIGN_OR_RETURN(const auto endpoints, Resolve(address_, /*passive=*/false));
  absl::Status why;
  for (const auto& endpoint : endpoints) {
    auto connection = CallConnection::To(endpoint, pool_, limits_, deadline_ns);
    if (connection.ok()) return connection;
    why = connection.status();
  }
  if (!absl::IsUnavailable(why)) return why;
  return absl::UnavailableError(absl::StrCat("cannot connect to ", address_.ToString(), ": ",
                                             std::string(why.message()), "; is the server running there?"));
}

absl::StatusOr<std::string> Caller::Call(Method method, std::string request, int64_t timeout_ms) {
  if (method.size() > kMaxControlBytes || request.size() > UINT32_MAX)
    return absl::ResourceExhaustedError(absl::StrCat("a request of ", request.size(), " bytes cannot be sent"));
  const int64_t deadline_ns = SteadyClock().Now() + timeout_ms * kNsPerMs;
  absl::StatusOr<std::unique_ptr<CallConnection>> connection = Connect(deadline_ns);
  absl::StatusOr<std::string> reply =
      connection.ok() ? (*connection)->Call(method, request, deadline_ns) : connection.status();
  if (connection.ok() && (*connection)->reusable()) {
    absl::MutexLock lock(&mu_);
    if (idle_.size() < kMaxIdle) idle_.push_back(*std::move(connection));
  } else if (connection.ok() && absl::IsDeadlineExceeded(reply.status()) && reply.status().message().empty()) {
    return absl::DeadlineExceededError(
        absl::StrCat(std::string(method), " was not answered within ", timeout_ms, " ms by ", address_.ToString()));
  } else if (!connection.ok() && absl::IsDeadlineExceeded(reply.status())) {
    return absl::DeadlineExceededError(
        absl::StrCat("no connection to ", address_.ToString(), " within ", timeout_ms, " ms"));
  }
  return reply;
}

}  // namespace gradwire::transport::tcp

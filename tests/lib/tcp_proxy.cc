// See tcp_proxy.h.
#include "tests/lib/tcp_proxy.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

#include "absl/strings/str_cat.h"

namespace gradwire::testing_support {
namespace {

sockaddr_in Loopback(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

}  // namespace

// Two sockets; waiting[i] is what socket i is to be sent.
struct TcpProxy::Connection {
  int sockets[2] = {-1, -1};
  std::string waiting[2];
  uint64_t number = 0;
  bool broken = false;

  ~Connection() {
    for (int socket : sockets)
      if (socket >= 0) close(socket);
  }

  // What poll is to wait for on socket i.
  short Events(int i) const {
    const bool room = waiting[1 - i].size() < kBufferBytes;
    return static_cast<short>((room ? POLLIN : 0) | (waiting[i].empty() ? 0 : POLLOUT));
  }

  void Move(int i, short events, TcpProxy* proxy) {
    if ((events & (POLLIN | POLLHUP | POLLERR)) != 0) {
      char buffer[64 << 10];
      const ssize_t n = recv(sockets[i], buffer, sizeof(buffer), MSG_DONTWAIT);
      if (n > 0) proxy->Damage(buffer, static_cast<size_t>(n));
      if (n > 0) proxy->ChangeOf(2 * number + static_cast<uint64_t>(i), i == 0, buffer, static_cast<size_t>(n));
      if (n > 0) waiting[1 - i].append(buffer, static_cast<size_t>(n));
      if (n == 0 || (n < 0 && errno != EAGAIN)) broken = true;
    }
    if ((events & POLLOUT) != 0) {
      const ssize_t n = send(sockets[i], waiting[i].data(), waiting[i].size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (n > 0) waiting[i].erase(0, static_cast<size_t>(n));
      if (n < 0 && errno != EAGAIN) broken = true;
    }
  }
};

TcpProxy::TcpProxy(const std::string& address)
    : scheme_(address.substr(0, address.find(':'))),
      target_port_(static_cast<uint16_t>(std::atoi(address.substr(address.rfind(':') + 1).c_str()))),
      listener_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  const sockaddr_in name = Loopback(0);
  const int held = kBufferBytes;  // by the kernel for each connection, which by itself may hold tens of MiB
  setsockopt(listener_, SOL_SOCKET, SO_RCVBUF, &held, sizeof(held));
  if (bind(listener_, reinterpret_cast<const sockaddr*>(&name), sizeof(name)) != 0 || listen(listener_, 64) != 0) {
    std::abort();  // a machine without a loopback
  }
  thread_ = std::thread([this] { Run(); });
}

TcpProxy::~TcpProxy() {
  {
    absl::MutexLock lock(&mu_);
    stop_ = true;
  }
  Wake();
  thread_.join();
  connections_.clear();
  close(listener_);
  close(wake_);
}

std::string TcpProxy::address() const {
  sockaddr_in name{};
  socklen_t length = sizeof(name);
  getsockname(listener_, reinterpret_cast<sockaddr*>(&name), &length);
  return absl::StrCat(scheme_, "://127.0.0.1:", ntohs(name.sin_port));
}

void TcpProxy::Cut() {
  {
    absl::MutexLock lock(&mu_);
    cut_ = true;
  }
  Wake();
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(&silent_));
}

void TcpProxy::Heal() {
  {
    absl::MutexLock lock(&mu_);
    cut_ = silent_ = false;
  }
  Wake();
}

void TcpProxy::FlipBits(size_t gap_bytes, uint64_t seed) {
  seed_.store(seed);
  gap_bytes_.store(gap_bytes);
}

void TcpProxy::FlipOnce(size_t bytes, int bit) {
  absl::MutexLock lock(&mu_);
  once_ = {bytes, bit};
}

void TcpProxy::PassThrough(Change change) {
  absl::MutexLock lock(&mu_);
  change_ = std::move(change);
}

void TcpProxy::ChangeOf(uint64_t flow, bool to_server, char* bytes, size_t count) {
  Change change;
  {
    absl::MutexLock lock(&mu_);
    change = change_;
  }
  if (change) change(flow, to_server, bytes, count);
}

void TcpProxy::Damage(char* bytes, size_t count) {
  {
    absl::MutexLock lock(&mu_);
    if (once_ && once_->first < count) {
      bytes[once_->first] = static_cast<char>(bytes[once_->first] ^ (1 << once_->second));
      flips_.fetch_add(1);
      once_.reset();
    } else if (once_) {
      once_->first -= count;
    }
  }
  const size_t gap = gap_bytes_.load();
  if (gap == 0) return;
  const auto draw = [&] { return std::uniform_int_distribution<size_t>(1, 2 * gap)(random_); };
  if (until_flip_ == 0) {
    random_.seed(seed_.load());
    until_flip_ = draw();
  }
  size_t at = until_flip_;
  for (; at <= count; at += draw()) {
    bytes[at - 1] = static_cast<char>(bytes[at - 1] ^ (1 << (random_() % 8)));
    flips_.fetch_add(1);
  }
  until_flip_ = at - count;
}

void TcpProxy::Wake() { eventfd_write(wake_, 1); }

void TcpProxy::Run() {
  while (Step()) {
  }
}

bool TcpProxy::Step() {
  bool cut = false;
  {
    absl::MutexLock lock(&mu_);
    if (stop_) return false;
    cut = silent_ = cut_;
  }
  std::vector<pollfd> polled = {{wake_, POLLIN, 0}};
  if (!cut) {
    polled.push_back({listener_, POLLIN, 0});
    for (const auto& connection : connections_)
      for (int i : {0, 1}) polled.push_back({connection->sockets[i], connection->Events(i), 0});
  }
  poll(polled.data(), polled.size(), -1);
  eventfd_t ignored = 0;
  eventfd_read(wake_, &ignored);
  if (cut) return true;
  for (size_t c = 0; c < connections_.size(); ++c)
    for (int i : {0, 1}) connections_[c]->Move(i, polled[2 + 2 * c + static_cast<size_t>(i)].revents, this);
  std::erase_if(connections_, [](const auto& connection) { return connection->broken; });
  if (polled[1].revents != 0) Accept();
  return true;
}

void TcpProxy::Accept() {
  auto connection = std::make_unique<Connection>();
  connection->number = accepted_++;
  connection->sockets[0] = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  connection->sockets[1] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in name = Loopback(target_port_);
  if (connection->sockets[0] < 0 ||
      connect(connection->sockets[1], reinterpret_cast<const sockaddr*>(&name), sizeof(name)) != 0) {
    return;
  }
  const int one = 1;
  for (int socket : connection->sockets) setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  connections_.push_back(std::move(connection));
}

}  // namespace gradwire::testing_support

// See acceptor.h.
#include "common/transport/grpc/acceptor.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/base/status_macros.h"
#include "common/transport/catch_exhausted.h"

namespace gradwire::transport {
namespace {

constexpr int kSweepMs = 1000;
constexpr int kRetryMs = 100;                 // after a connection that could not be accepted
constexpr TimeNs kSweepPauseNs = 20'000'000;  // while connections are refused
constexpr int kAtATime = 256;                 // connections, until this looks whether it is to stop

bool IsStill(int socket, ino_t inode) {
  struct stat now {};
  return fstat(socket, &now) == 0 && now.st_ino == inode;
}

// As gRPC's ServerContext::peer, without its percent-encoding; empty where that does not tell connections apart.
std::string NameOf(const sockaddr_storage& peer) {
  char text[INET6_ADDRSTRLEN] = "";
  if (peer.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(peer);
    return absl::StrCat("ipv4:", inet_ntop(AF_INET, &v4.sin_addr, text, sizeof(text)), ":", ntohs(v4.sin_port));
  }
  if (peer.ss_family != AF_INET6) return "";
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(peer);
  if (IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) {
    inet_ntop(AF_INET, &v6.sin6_addr.s6_addr[12], text, sizeof(text));
    return absl::StrCat("ipv4:", text, ":", ntohs(v6.sin6_port));
  }
  if (v6.sin6_scope_id != 0) return "";
  return absl::StrCat("ipv6:[", inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof(text)), "]:", ntohs(v6.sin6_port));
}

std::string Decoded(const std::string& peer) {
  return absl::StrReplaceAll(peer, {{"%5B", "["}, {"%5D", "]"}, {"%5b", "["}, {"%5d", "]"}});
}

absl::Status CannotListen(const Address& address, std::string_view why) {
  return absl::UnavailableError(absl::StrCat("cannot listen on ", address.ToString(), ": ", std::string(why),
                                             "; choose another address or stop what holds it"));
}

// A socket file of a live server is not replaced; a connection tells whether one listens.
bool Answers(const sockaddr_un& name) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  const bool answers = connect(fd, reinterpret_cast<const sockaddr*>(&name), sizeof(name)) == 0;
  close(fd);
  return answers;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Acceptor>> Acceptor::Listen(const Address& address, const Caps& caps) {
  std::unique_ptr<Acceptor> acceptor(new Acceptor(address, caps));
  acceptor->wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (acceptor->wake_ < 0) return CannotListen(address, std::strerror(errno));
  GW_RETURN_IF_ERROR(address.scheme == Scheme::kUnix ? acceptor->BindPath() : acceptor->BindHost());
  return acceptor;
}

Acceptor::~Acceptor() {
  Stop();
  for (int listener : listeners_) close(listener);
  if (!listeners_.empty() && address_.scheme == Scheme::kUnix) unlink(address_.name.c_str());
  if (wake_ >= 0) close(wake_);
}

absl::Status Acceptor::Bind(int family, const void* name, size_t bytes) {
  const int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const int on = 1, off = 0;
  if (fd >= 0 && family != AF_UNIX) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (fd >= 0 && family == AF_INET6) {
    const auto* v6 = static_cast<const sockaddr_in6*>(name);
    const bool any = IN6_IS_ADDR_UNSPECIFIED(&v6->sin6_addr);
    setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, any ? &off : &on, sizeof(on));
  }
  if (fd < 0 || bind(fd, static_cast<const sockaddr*>(name), static_cast<socklen_t>(bytes)) != 0 ||
      listen(fd, SOMAXCONN) != 0) {
    const int why = errno;
    if (fd >= 0) close(fd);
    return CannotListen(address_, why == EADDRINUSE ? "address in use" : std::strerror(why));
  }
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  if (family != AF_UNIX && getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &size) == 0) {
    address_.port = ntohs(family == AF_INET ? reinterpret_cast<const sockaddr_in&>(bound).sin_port
                                            : reinterpret_cast<const sockaddr_in6&>(bound).sin6_port);
  }
  listeners_.push_back(fd);
  return absl::OkStatus();
}

absl::Status Acceptor::BindHost() {
  if (address_.host == "0.0.0.0") {
    sockaddr_in6 any{};
    any.sin6_family = AF_INET6;
    any.sin6_port = htons(address_.port);
    if (Bind(AF_INET6, &any, sizeof(any)).ok()) return absl::OkStatus();
  }
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(address_.host.c_str(), absl::StrCat(address_.port).c_str(), &hints, &found);
  if (error != 0) return CannotListen(address_, gai_strerror(error));
  absl::Status why;
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    sockaddr_storage name{};
    std::memcpy(&name, each->ai_addr, each->ai_addrlen);
    // All of them have the port that the first one got.
    if (each->ai_family == AF_INET) reinterpret_cast<sockaddr_in&>(name).sin_port = htons(address_.port);
    if (each->ai_family == AF_INET6) reinterpret_cast<sockaddr_in6&>(name).sin6_port = htons(address_.port);
    const absl::Status bound = Bind(each->ai_family, &name, each->ai_addrlen);
    if (why.ok()) why = bound;
  }
  freeaddrinfo(found);
  return listeners_.empty() ? why : absl::OkStatus();
}

absl::Status Acceptor::BindPath() {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  if (address_.name.size() >= sizeof(name.sun_path)) {
    return CannotListen(address_, absl::StrCat("its path has ", address_.name.size(), " bytes, at most ",
                                               sizeof(name.sun_path) - 1, " are possible"));
  }
  std::memcpy(name.sun_path, address_.name.data(), address_.name.size());
  if (Answers(name)) return CannotListen(address_, "address in use");
  const std::string folder = address_.name.substr(0, address_.name.rfind('/') + 1);
  if (access(folder.c_str(), W_OK) != 0)
    return CannotListen(address_, absl::StrCat("its folder: ", std::strerror(errno)));
  struct stat old {};
  if (stat(address_.name.c_str(), &old) == 0 && S_ISSOCK(old.st_mode)) unlink(address_.name.c_str());
  return Bind(AF_UNIX, &name, sizeof(name));
}

absl::Status Acceptor::Start(Take take) {
  take_ = std::move(take);
  return CatchExhausted("the thread of a listener", [&] {
    std::vector<pollfd> polled = {{wake_, POLLIN, 0}};
    for (int listener : listeners_) polled.push_back({listener, POLLIN, 0});
    thread_ = std::thread([this, polled = std::move(polled)]() mutable { Run(std::move(polled)); });
    return absl::OkStatus();
  });
}

void Acceptor::Stop() {
  if (!thread_.joinable()) return;
  eventfd_write(wake_, 1);
  thread_.join();
}

void Acceptor::Run(std::vector<pollfd> polled) {
  bool well = true;
  for (;;) {
    for (size_t i = 1; i < polled.size(); ++i) polled[i].fd = well ? listeners_[i - 1] : -1;
    if (poll(polled.data(), polled.size(), well ? kSweepMs : kRetryMs) < 0) continue;
    if (polled[0].revents != 0) return;
    well = true;
    for (size_t i = 1; i < polled.size(); ++i) {
      if (polled[i].revents == 0) continue;
      // What there is no memory for now is tried again, as what there are no descriptors for.
      const absl::Status accepted = CatchExhausted("connections", [&] {
        well = AcceptAll(polled[i].fd) && well;
        return absl::OkStatus();
      });
      well = accepted.ok() && well;
    }
    const TimeNs now = SteadyClock().Now();
    if (now - swept_ < TimeNs{kSweepMs} * 1'000'000) continue;
    swept_ = now;
    absl::MutexLock lock(&mu_);
    Sweep();
  }
}

bool Acceptor::AcceptAll(int listener) {
  for (int accepted = 0; accepted < kAtATime; ++accepted) {
    const int socket = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (socket >= 0) {
      Admit(listener, socket);
      continue;
    }
    const int why = errno;
    if (why == EAGAIN || why == EWOULDBLOCK) return true;
    if (why == EINTR || why == ECONNABORTED) continue;
    Warn(absl::StrCat(address_.ToString(), ": a connection could not be accepted: ", std::strerror(why),
                      "; it is tried again"));
    absl::MutexLock lock(&mu_);
    if (why == EMFILE || why == ENFILE) MakeRoom(/*unopened=*/false);
    return false;
  }
  return true;
}

void Acceptor::Admit(int listener, int socket) {
  sockaddr_storage peer{};
  socklen_t size = sizeof(peer);
  struct stat file {};
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &size) != 0 || fstat(socket, &file) != 0) {
    close(socket);  // it is gone again
    return;
  }
  const int on = 1;
  if (peer.ss_family != AF_UNIX) setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  Connection connection{socket, file.st_ino, 0, false, true, SteadyClock().Now()};
  bool admitted = false;
  {
    absl::MutexLock lock(&mu_);
    const auto most = static_cast<size_t>(caps_.max_connections);
    if (connections_.size() >= most && connection.used - swept_ >= kSweepPauseNs) {
      swept_ = connection.used;
      Sweep();
    }
    const auto unopened = [](const auto& entry) { return !entry.second.opened && entry.second.evictable; };
    if (connections_.size() >= static_cast<size_t>(caps_.max_handshakes) &&
        std::count_if(connections_.begin(), connections_.end(), unopened) >= caps_.max_handshakes) {
      MakeRoom(/*unopened=*/true);
    }
    if (connections_.size() < most || MakeRoom(/*unopened=*/false)) {
      admitted = CatchExhausted("a connection", [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
                   std::string name = NameOf(peer);
                   connection.evictable = !name.empty();
                   if (name.empty()) name = absl::StrCat("socket ", socket);
                   connections_.insert_or_assign(std::move(name), connection);
                   return absl::OkStatus();
                 }).ok();
    }
  }
  if (admitted) return take_(listener, socket);
  close(socket);
  Warn(absl::StrCat(address_.ToString(), ": a connection was refused: ", caps_.max_connections,
                    " are in use, as many as there may be (--max-connections)"));
}

void Acceptor::Sweep() {
  std::erase_if(connections_, [](const auto& entry) { return !IsStill(entry.second.socket, entry.second.inode); });
}

bool Acceptor::MakeRoom(bool unopened) {
  auto idlest = connections_.end();
  for (auto it = connections_.begin(); it != connections_.end(); ++it) {
    const Connection& c = it->second;
    if (c.calls != 0 || !c.evictable || (unopened && c.opened)) continue;
    if (idlest == connections_.end() || c.used < idlest->second.used) idlest = it;
  }
  if (idlest == connections_.end()) return false;
  // gRPC could close it between these two lines, and another socket get its number: that one would have to connect
  // anew.
  if (IsStill(idlest->second.socket, idlest->second.inode)) (void)::shutdown(idlest->second.socket, SHUT_RDWR);
  connections_.erase(idlest);
  return true;
}

std::string Acceptor::CallBegan(const std::string& peer) {
  std::string name = Decoded(peer);
  absl::MutexLock lock(&mu_);
  const auto it = connections_.find(name);
  if (it == connections_.end()) return name;
  ++it->second.calls;
  it->second.opened = true;
  return name;
}

void Acceptor::CallEnded(const std::string& name) {
  absl::MutexLock lock(&mu_);
  const auto it = connections_.find(name);
  if (it == connections_.end()) return;
  it->second.calls = std::max(it->second.calls - 1, 0);
  it->second.used = SteadyClock().Now();
}

void Acceptor::Warn(const std::string& what) {
  if (caps_.warn && warnings_.Admit(SteadyClock().Now())) caps_.warn(what);
}

}  // namespace gradwire::transport

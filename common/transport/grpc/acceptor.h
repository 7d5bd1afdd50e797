// Listens and accepts in place of gRPC, whose own listener stops for good when descriptors run out: connections have a
// cap, the one that has been idle for longest makes room, and what cannot be accepted now is tried again.
//
// gRPC owns a connection once it was handed over and does not say when it ends. A descriptor that still is the same
// socket (by its inode) stands; which connection a call came on is told by the peer's address.
#pragma once

#include <poll.h>
#include <sys/stat.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/base/clock.h"
#include "common/transport/address.h"
#include "common/transport/caps.h"
#include "common/transport/warning_clock.h"

namespace gradwire::transport {

// Thread-safe. Owns one thread, from Start to its destruction.
class Acceptor {
 public:
  // Takes a connected socket over.
  using Take = std::function<void(int listener, int socket)>;

  // Listens on every address that the host has; a host that is any address is so for IPv6 too. Unavailable, with the
  // system's reason, when none can be bound.
  static absl::StatusOr<std::unique_ptr<Acceptor>> Listen(const Address& address, const Caps& caps);
  ~Acceptor();

  const Address& address() const { return address_; }  // with the port that was bound
  // Begins to accept. ResourceExhausted where no thread can be started.
  absl::Status Start(Take take);
  // Nothing is accepted any more when it returns.
  void Stop();

  // A call came in from this peer, as gRPC names it; what it is called here. It has ended: of the peer called so here.
  std::string CallBegan(const std::string& peer) ABSL_LOCKS_EXCLUDED(mu_);
  void CallEnded(const std::string& name) ABSL_LOCKS_EXCLUDED(mu_);
  void Warn(const std::string& what);

 private:
  struct Connection {
    int socket = -1;
    ino_t inode = 0;
    int calls = 0;          // that run
    bool opened = false;    // there was one
    bool evictable = true;  // calls can be told from those of others
    TimeNs used = 0;
  };

  Acceptor(const Address& address, const Caps& caps) : address_(address), caps_(caps) {}
  absl::Status Bind(int family, const void* name, size_t bytes);
  absl::Status BindHost();
  absl::Status BindPath();
  void Run(std::vector<pollfd> polled);
  // Accepts what waits at `listener`. False: nothing can be accepted now.
  bool AcceptAll(int listener);
  void Admit(int listener, int socket);
  // Forgets connections that have ended.
  void Sweep() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Cuts off the connection that has been idle for longest, of those that never made a call where `unopened`.
  bool MakeRoom(bool unopened) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Address address_;
  const Caps caps_;
  std::vector<int> listeners_;
  int wake_ = -1;
  Take take_;
  WarningClock warnings_;
  TimeNs swept_ = 0;  // of the thread
  std::thread thread_;

  absl::Mutex mu_;
  std::unordered_map<std::string, Connection> connections_ ABSL_GUARDED_BY(mu_);  // by the peer's name
};

}  // namespace gradwire::transport

// A TCP proxy on the loopback that can stop forwarding: a network partition without root. Both ends keep their
// connections and hear nothing, as they do when a link goes silent.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace gradwire::testing_support {

// Thread-safe. One thread forwards every connection; at most kBufferBytes wait per direction.
class TcpProxy {
 public:
  static constexpr size_t kBufferBytes = 1 << 20;

  // Forwards to `address`, SCHEME://127.0.0.1:PORT.
  explicit TcpProxy(const std::string& address);
  ~TcpProxy();
  TcpProxy(const TcpProxy&) = delete;
  TcpProxy& operator=(const TcpProxy&) = delete;

  // What to dial instead.
  std::string address() const;
  // From here on no byte passes, and nothing is closed or refused. Returns when the last one has passed.
  void Cut();
  // Forwards again: also what waited meanwhile, on connections that still stand.
  void Heal();

 private:
  struct Connection;
  void Run();
  void Wake();
  bool Step();  // false: stop
  void Accept();

  const std::string scheme_;
  const uint16_t target_port_;
  int listener_ = -1;
  int wake_ = -1;
  std::vector<std::unique_ptr<Connection>> connections_;  // of the thread alone
  absl::Mutex mu_;
  bool cut_ ABSL_GUARDED_BY(mu_) = false;
  bool silent_ ABSL_GUARDED_BY(mu_) = false;  // the thread has seen cut_
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace gradwire::testing_support

// A TCP proxy on the loopback that can stop forwarding: a network partition without root. Both ends keep their
// connections and hear nothing, as they do when a link goes silent. And that can damage what it forwards.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
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
  // From here on flips a bit about every `gap_bytes` bytes, whichever way they go.
  void FlipBits(size_t gap_bytes, uint64_t seed);
  // Whatever passes from now on goes through `change` first, piece by piece, on the proxy's thread. `flow`: which
  // direction of which connection.
  using Change = std::function<void(uint64_t flow, bool to_server, char* bytes, size_t count)>;
  void PassThrough(Change change);
  // Flips one bit of the byte that passes next but `bytes`, whichever way it goes.
  void FlipOnce(size_t bytes, int bit);
  size_t flips() const { return flips_.load(); }

 private:
  struct Connection;
  void Run();
  void Wake();
  bool Step();  // false: stop
  void Accept();
  void Damage(char* bytes, size_t count);
  void ChangeOf(uint64_t flow, bool to_server, char* bytes, size_t count);

  const std::string scheme_;
  const uint16_t target_port_;
  int listener_ = -1;
  int wake_ = -1;
  std::vector<std::unique_ptr<Connection>> connections_;  // of the thread alone
  absl::Mutex mu_;
  bool cut_ ABSL_GUARDED_BY(mu_) = false;
  bool silent_ ABSL_GUARDED_BY(mu_) = false;  // the thread has seen cut_
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::atomic<size_t> flips_ = 0;
  std::atomic<size_t> gap_bytes_ = 0;  // 0: none are flipped
  std::atomic<uint64_t> seed_ = 0;
  Change change_ ABSL_GUARDED_BY(mu_);
  std::optional<std::pair<size_t, int>> once_ ABSL_GUARDED_BY(mu_);
  uint64_t accepted_ = 0;  // connections; of the thread, as what follows
  std::mt19937_64 random_;
  size_t until_flip_ = 0;  // bytes
  std::thread thread_;
};

}  // namespace gradwire::testing_support

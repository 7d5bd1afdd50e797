// Unary calls of a channel: the calling thread writes the request and reads the reply by itself, so no other thread is
// woken. Connections are kept for later calls; calls at the same time have one each.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/transport/address.h"
#include "common/transport/asio/buffer_pool.h"
#include "common/transport/transport.h"

namespace gradwire::transport::tcp {

class CallConnection;

// Thread-safe. Bound: kMaxIdle connections are kept.
class Caller {
 public:
  Caller(const Address& address, const Limits& limits, std::shared_ptr<BufferPool> pool);
  ~Caller();
  // As Channel's.
  absl::StatusOr<std::string> Call(Method method, std::string request, int64_t timeout_ms) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  static constexpr size_t kMaxIdle = 4;

  // One that stands, kept or new.
  absl::StatusOr<std::unique_ptr<CallConnection>> Connect(int64_t deadline_ns) ABSL_LOCKS_EXCLUDED(mu_);

  const Address address_;
  const Limits limits_;
  const std::shared_ptr<BufferPool> pool_;
  absl::Mutex mu_;
  std::vector<std::unique_ptr<CallConnection>> idle_ ABSL_GUARDED_BY(mu_);
};

}  // namespace gradwire::transport::tcp

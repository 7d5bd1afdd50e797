// What waits to be sent to one worker: every answer it pulls counts here, on whichever stream and however it was asked
// for, from when it is made until the transport lets go of its bytes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"

namespace gradwire {

// Thread-safe. Shared by the streams of one member and by the bytes that are counted.
class UnsentBudget {
 public:
  explicit UnsentBudget(uint64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // ResourceExhausted with the numbers: an answer of so many bytes would pass the limit. Sound without a lock: the
  // limit may be passed by one answer per thread.
  absl::Status CheckRoom(uint64_t bytes) const;
  // Keeps an answer of so many bytes, which count until the last copy of what this returns is gone: until then a worker
  // that has left one chunk unread may hold all of them.
  static std::shared_ptr<const void> Count(std::shared_ptr<UnsentBudget> budget, std::shared_ptr<const void> answer,
                                           uint64_t bytes);

  uint64_t bytes() const { return bytes_; }
  uint64_t limit_bytes() const { return limit_bytes_; }

 private:
  struct Counted;

  const uint64_t limit_bytes_;
  std::atomic<uint64_t> bytes_{0};
};

}  // namespace gradwire

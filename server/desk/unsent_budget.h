// What waits to be sent to one worker: every answer it pulls counts here, on whichever stream and however it was asked
// for, from when it is made until the transport lets go of its bytes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/bytes.h"

namespace gradwire {

// Thread-safe. Shared by the streams of one member and by the bytes that are counted.
class UnsentBudget {
 public:
  explicit UnsentBudget(uint64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // The same bytes, each of which counts until its last copy is gone. ResourceExhausted with the numbers, and nothing
  // is counted: together they would be over the limit.
  static absl::StatusOr<std::vector<Bytes>> Count(const std::shared_ptr<UnsentBudget>& budget,
                                                  std::span<const Bytes> chunks);

  uint64_t bytes() const { return bytes_; }
  uint64_t limit_bytes() const { return limit_bytes_; }

 private:
  struct Counted;

  const uint64_t limit_bytes_;
  std::atomic<uint64_t> bytes_{0};
};

}  // namespace gradwire

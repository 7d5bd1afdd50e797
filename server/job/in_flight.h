// The bytes of a job's frames and uploads that are not whole yet.
#pragma once

#include <atomic>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"

namespace gradwire {

// Thread-safe, without a lock: the bound may be passed by one chunk per transport thread.
class InFlight {
 public:
  // Called before anything is held.
  void SetLimit(uint64_t bytes) { limit_bytes_ = bytes; }
  // ResourceExhausted with the numbers, where `more` bytes may not be held.
  absl::Status Check(uint64_t more) const {
    if (bytes_ + more <= limit_bytes_) return absl::OkStatus();
    return absl::ResourceExhaustedError(absl::StrFormat(
        "%d bytes of unfinished frames are held for this job, its limit is %d: push fewer buckets at once",
        bytes_.load(), limit_bytes_));
  }
  void Add(uint64_t bytes) { bytes_ += bytes; }
  void Return(uint64_t bytes) { bytes_ -= bytes; }
  uint64_t bytes() const { return bytes_; }

 private:
  uint64_t limit_bytes_ = 0;
  std::atomic<uint64_t> bytes_{0};
};

}  // namespace gradwire

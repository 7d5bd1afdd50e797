// Receive buffers, handed out last in, first out: a message whose consumer is done with it leaves its memory to the
// next one while that memory is still in the core's cache. Without that, receiving costs twice the CPU time.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace gradwire::transport::tcp {

// Thread-safe. Buffers may outlive the pool. Keeps at most kKeptBytes of free buffers.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  static constexpr size_t kAlignment = 64;
  static constexpr size_t kKeptBytes = 32u << 20;

  ~BufferPool();
  // At least `bytes` bytes, aligned to kAlignment, not zeroed. They return to the pool with the last copy.
  std::shared_ptr<uint8_t> Take(size_t bytes) ABSL_LOCKS_EXCLUDED(mu_);

  // What the readers of the pool hold of packets that have come in part.
  size_t held_bytes() const { return held_bytes_.load(std::memory_order_relaxed); }
  void AddHeld(size_t bytes) { held_bytes_.fetch_add(bytes, std::memory_order_relaxed); }
  void SubtractHeld(size_t bytes) { held_bytes_.fetch_sub(bytes, std::memory_order_relaxed); }
  uint64_t NextTurn() { return turns_.fetch_add(1, std::memory_order_relaxed) + 1; }

 private:
  static constexpr size_t kStepBytes = 64u << 10;   // buffers have a multiple of this
  static constexpr size_t kSmallBytes = 64u << 10;  // below it malloc is as good
  static constexpr size_t kSteps = 18;

  void Give(uint8_t* buffer, size_t step) ABSL_LOCKS_EXCLUDED(mu_);

  std::atomic<size_t> held_bytes_ = 0;
  std::atomic<uint64_t> turns_ = 0;
  absl::Mutex mu_;
  std::array<std::vector<uint8_t*>, kSteps> free_ ABSL_GUARDED_BY(mu_);  // [i]: of i * kStepBytes
  size_t free_bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace gradwire::transport::tcp

// The frames of one push stream on their way to the transport. The transport takes what it has room for at once, on the
// thread that sends; the rest follows as room comes, on the transport's threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <optional>
#include <tuple>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/internal/frame_link.h"
#include "common/transport/transport.h"

namespace gradwire::client {

// Thread-safe. A frame that has begun is ended before the next one begins. No bound of its own: whoever adds stops
// where `unsent` says so, and what is added is kept by its owner anyway.
class FrameQueue {
 public:
  // Of a link, whatever queue it has.
  struct Totals {
    std::atomic<uint64_t> unsent{0};  // bytes that wait here
    std::atomic<uint64_t> sent{0};    // bytes that the transport took
  };

  // Both outlive the queue.
  FrameQueue(transport::Stream* stream, Totals* totals) : stream_(*stream), totals_(*totals) {}
  ~FrameQueue();  // what was not sent is forgotten
  FrameQueue(const FrameQueue&) = delete;
  FrameQueue& operator=(const FrameQueue&) = delete;

  // Errors: the stream's; nothing is sent any more then.
  absl::Status Add(OutgoingFrame frame);
  // Hands over what the stream has room for; where it has none, OnRoom of its sink is to call this again.
  absl::Status Pump();

 private:
  using Place = std::tuple<uint64_t, uint32_t, uint64_t>;  // round, turn, order of arrival

  // Releases the lock while it sends.
  absl::Status PumpLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool HasNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);  // begins a frame where none has begun
  transport::Message Next() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Begin(OutgoingFrame frame) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Sent() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);  // what Next said
  bool at_last_chunk() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return chunk_ + 1 == begun_->chunks.size(); }

  transport::Stream& stream_;
  Totals& totals_;

  absl::Mutex mu_;
  std::map<Place, OutgoingFrame> waiting_ ABSL_GUARDED_BY(mu_);
  std::optional<OutgoingFrame> begun_ ABSL_GUARDED_BY(mu_);
  size_t chunk_ ABSL_GUARDED_BY(mu_) = 0;         // of begun_, which goes next
  v1::PushMessage control_ ABSL_GUARDED_BY(mu_);  // of Next, kept for its memory
  uint64_t arrived_ ABSL_GUARDED_BY(mu_) = 0;
  bool pumping_ ABSL_GUARDED_BY(mu_) = false;  // a thread is at it
  bool again_ ABSL_GUARDED_BY(mu_) = false;    // and is to look once more
  absl::Status failed_ ABSL_GUARDED_BY(mu_);
};

}  // namespace gradwire::client

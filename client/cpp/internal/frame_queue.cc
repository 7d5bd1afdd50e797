// See frame_queue.h.
#include "client/cpp/internal/frame_queue.h"

#include <utility>

#include "absl/status/statusor.h"
#include "common/base/failpoint.h"

namespace gradwire::client {

FrameQueue::~FrameQueue() {
  absl::MutexLock lock(&mu_);
  uint64_t bytes = begun_ ? TotalSize(begun_->chunks) : 0;
  for (size_t i = 0; begun_ && i < chunk_; ++i) bytes -= begun_->chunks[i].size();
  for (const auto& [place, frame] : waiting_) bytes += TotalSize(frame.chunks);
  totals_.unsent -= bytes;
}

absl::Status FrameQueue::Add(OutgoingFrame frame) {
  {
    absl::MutexLock lock(&mu_);
    if (!failed_.ok()) return failed_;
    totals_.unsent += TotalSize(frame.chunks);
    waiting_.emplace(Place{frame.round, frame.turn, arrived_++}, std::move(frame));
  }
  return Pump();
}

absl::Status FrameQueue::Pump() {
  {
    absl::MutexLock lock(&mu_);
    if (!failed_.ok()) return failed_;
    again_ = pumping_;
    if (pumping_) return absl::OkStatus();
    pumping_ = true;
  }
  for (transport::Message message; Next(&message);) {
    const absl::StatusOr<bool> sent = stream_.TrySend(message);
    bool half = false;
    {
      absl::MutexLock lock(&mu_);
      if (!sent.ok()) {
        failed_ = sent.status();
        pumping_ = false;
        return failed_;
      }
      if (!*sent) {
        if (std::exchange(again_, false)) continue;  // room may have come before this thread stops
        pumping_ = false;
        return absl::OkStatus();
      }
      const size_t bytes = begun_->chunks[chunk_].size();
      totals_.unsent -= bytes;
      totals_.sent += bytes;
      half = !at_last_chunk();
      if (half) {
        ++chunk_;
      } else {
        begun_.reset();
      }
    }
    if (half) GW_FAILPOINT("worker.frame.half_sent");
  }
  return absl::OkStatus();
}

bool FrameQueue::Next(transport::Message* message) {
  absl::MutexLock lock(&mu_);
  if (!begun_) {
    if (waiting_.empty()) {
      pumping_ = again_ = false;
      return false;
    }
    begun_ = std::move(waiting_.extract(waiting_.begin()).mapped());
    chunk_ = 0;
  }
  v1::PushMessage control;
  if (at_last_chunk())
    for (v1::PullKind kind : begun_->pull) control.add_pull(kind);
  *message = {control.SerializeAsString(), {begun_->chunks[chunk_]}};
  return true;
}

}  // namespace gradwire::client

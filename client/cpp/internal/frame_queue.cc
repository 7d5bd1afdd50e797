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
  absl::MutexLock lock(&mu_);
  if (!failed_.ok()) return failed_;
  totals_.unsent += TotalSize(frame.chunks);
  if (!begun_ && waiting_.empty()) {
    Begin(std::move(frame));
  } else {
    waiting_.emplace(Place{frame.round, frame.turn, arrived_++}, std::move(frame));
  }
  return PumpLocked();
}

absl::Status FrameQueue::Pump() {
  absl::MutexLock lock(&mu_);
  return PumpLocked();
}

absl::Status FrameQueue::PumpLocked() {
  if (!failed_.ok()) return failed_;
  again_ = pumping_;
  if (pumping_) return absl::OkStatus();
  pumping_ = true;
  while (failed_.ok() && HasNext()) {
    transport::Message message = Next();
    const bool half = !at_last_chunk();
    mu_.Unlock();
    const absl::StatusOr<bool> sent = stream_.TrySend(message);
    if (half && sent.ok() && *sent) GW_FAILPOINT("worker.frame.half_sent");
    mu_.Lock();
    if (!sent.ok()) {
      failed_ = sent.status();
    } else if (*sent) {
      Sent();
    } else if (!std::exchange(again_, false)) {
      break;  // else room may have come before this thread stops
    }
  }
  pumping_ = false;
  return failed_;
}

bool FrameQueue::HasNext() {
  if (!begun_ && !waiting_.empty()) Begin(std::move(waiting_.extract(waiting_.begin()).mapped()));
  return begun_.has_value();
}

transport::Message FrameQueue::Next() {
  transport::Message message;
  message.frame.push_back(begun_->chunks[chunk_]);
  if (at_last_chunk() && !begun_->pull.empty()) {
    control_.mutable_pull()->Assign(begun_->pull.begin(), begun_->pull.end());
    message.control = control_.SerializeAsString();
  }
  return message;
}

void FrameQueue::Begin(OutgoingFrame frame) {
  begun_ = std::move(frame);
  chunk_ = 0;
}

void FrameQueue::Sent() {
  const size_t bytes = begun_->chunks[chunk_].size();
  totals_.unsent -= bytes;
  totals_.sent += bytes;
  if (at_last_chunk()) {
    begun_.reset();
  } else {
    ++chunk_;
  }
}

}  // namespace gradwire::client

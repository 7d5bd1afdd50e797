// See stream_core.h. gRPC operations and sinks are called without the lock; the flags writing_ and reading_ give the
// thread that set them the sole right to start the operation.
#include "common/transport/grpc/stream_core.h"

#include <optional>
#include <utility>

#include "common/base/status_macros.h"
#include "common/transport/catch_exhausted.h"
#include "common/transport/grpc/message_codec.h"
#include "common/transport/sink_scope.h"

namespace gradwire::transport {

StreamCore::StreamCore(size_t window_bytes)
    : window_bytes_(window_bytes),
      read_done_(this, &StreamCore::OnReadDone),
      write_done_(this, &StreamCore::OnWriteDone) {}

void StreamCore::set_sink(StreamSink* sink) {
  absl::MutexLock lock(&mu_);
  sink_ = sink;
}

absl::Status StreamCore::Send(Message message) {
  const WhereFull where_full = SinkScope::Any() ? WhereFull::kQueue : WhereFull::kWait;
  return CatchExhausted("a message to send", [&] { return Queue(message, where_full); }).status();
}

absl::StatusOr<bool> StreamCore::TrySend(Message& message) {
  return CatchExhausted("a message to send", [&] { return Queue(message, WhereFull::kRefuse); });
}

absl::StatusOr<bool> StreamCore::Queue(Message& message, WhereFull where_full) {
  message.Complete();
  ::grpc::ByteBuffer buffer;
  {
    absl::MutexLock lock(&mu_);
    if (!CanSend() && where_full == WhereFull::kRefuse) {
      room_wanted_ = true;
      return false;
    }
    if (!CanSend() && where_full == WhereFull::kWait) mu_.Await(absl::Condition(this, &StreamCore::HalfEmpty));
    if (broken_ || finish_requested_) {
      if (!abort_status_.ok()) return abort_status_;
      if (!final_status_.ok()) return final_status_;
      return absl::FailedPreconditionError("the stream has ended; open a new one");
    }
    buffer = EncodeMessage(std::move(message), checks_ ? std::optional<uint64_t>(sent_) : std::nullopt);
    const size_t bytes = buffer.Length();
    ++sent_;
    if (writing_ || !queue_.empty()) {  // what is queued goes first; whoever cleared writing_ is about to pump
      queue_.push_back(std::move(buffer));
      queued_bytes_ += bytes;
      return true;
    }
    queued_bytes_ += bytes;
    writing_ = true;
    in_flight_bytes_ = bytes;
  }
  StartWrite(buffer, false, &write_done_);
  return true;
}

void StreamCore::Finish(absl::Status status) {
  {
    absl::MutexLock lock(&mu_);
    if (finish_requested_) return;
    finish_requested_ = true;
    finish_status_ = std::move(status);
  }
  Pump();
}

void StreamCore::Cancel() {
  {
    absl::MutexLock lock(&mu_);
    if (closing_) return;
  }
  Abort(absl::CancelledError("the stream was cancelled by its owner"));
}

void StreamCore::Abort(absl::Status status) {
  {
    absl::MutexLock lock(&mu_);
    // Who cancels a stream that ends already does not wait for a peer that takes nothing; it keeps its reason.
    if (closing_ || (!abort_status_.ok() && !absl::IsCancelled(status))) return;
    if (abort_status_.ok()) abort_status_ = status;
    finish_requested_ = true;
    DropQueue();
    broken_ = true;
  }
  StartAbort(status);
  Pump();
  Resume();
}

void StreamCore::Abandon() {
  Cancel();
  absl::MutexLock lock(&mu_);
  LeaveSink(this, &sink_, &closed_, &mu_);
}

void StreamCore::Break() {
  {
    absl::MutexLock lock(&mu_);
    DropQueue();
    broken_ = true;
  }
  Pump();
  Resume();
}

void StreamCore::Resume() {
  {
    absl::MutexLock lock(&mu_);
    if (!paused_ || (queued_bytes_ > PauseReadsAbove() && !broken_)) return;
    paused_ = false;
  }
  NextRead();
}

void StreamCore::Tick() {
  ::grpc::ByteBuffer alive;
  bool give = false;
  bool lost = false;
  {
    absl::MutexLock lock(&mu_);
    if (!checks_ || closing_ || ended_ || !abort_status_.ok()) return;
    silent_ticks_ = reading_ && !with_sink_ && !paused_ ? silent_ticks_ + 1 : 0;
    lost = silent_ticks_ >= kLostTicks;
    give = !lost && !std::exchange(wrote_, false) && !writing_ && queue_.empty() && !broken_ && !finish_requested_;
    if (give) {
      alive = AliveMessage(sent_);
      in_flight_bytes_ = alive.Length();
      queued_bytes_ += in_flight_bytes_;
      writing_ = true;
    }
  }
  if (give) StartWrite(alive, false, &write_done_);
  if (lost) Abort(Lost("the peer gives no sign of life on the stream"));
}

void StreamCore::DropQueue() {
  queue_.clear();
  queued_bytes_ = in_flight_bytes_;
}

void StreamCore::BeginWriting() { OnWriteDone(true); }

void StreamCore::BeginReading() {
  {
    absl::MutexLock lock(&mu_);
    reading_ = true;
  }
  NextRead();
}

void StreamCore::OnWriteDone(bool ok) {
  std::shared_ptr<StreamCore> self = shared_from_this();
  {
    absl::MutexLock lock(&mu_);
    writing_ = false;
    wrote_ = true;
    queued_bytes_ -= in_flight_bytes_;
    in_flight_bytes_ = 0;
    if (!ok) {
      broken_ = true;
      DropQueue();
    }
    if (queue_.empty() && !finish_requested_ && !paused_ && !room_wanted_ && !ended_) return;  // nothing waited for it
  }
  Pump();
  Resume();
  TellOfRoom();
  MaybeClose();
}

void StreamCore::TellOfRoom() {
  for (;;) {
    StreamSink* sink = nullptr;
    {
      absl::MutexLock lock(&mu_);
      if (!room_wanted_ || telling_ || closing_ || broken_ || !HalfEmpty()) return;
      room_wanted_ = false;
      telling_ = true;
      sink = sink_;
    }
    if (sink != nullptr) {
      SinkScope scope(this);
      sink->OnRoom();
    }
    absl::MutexLock lock(&mu_);
    telling_ = false;
  }
}

void StreamCore::Pump() {
  ::grpc::ByteBuffer buffer;
  absl::Status status;
  bool end = false;
  bool more = false;
  {
    absl::MutexLock lock(&mu_);
    if (writing_ || ended_) return;
    if (!queue_.empty()) {
      buffer.Swap(&queue_.front());
      queue_.pop_front();
      more = !queue_.empty();
      in_flight_bytes_ = buffer.Length();
    } else if (finish_requested_ && !end_started_) {
      end_started_ = end = true;
      status = abort_status_.ok() ? finish_status_ : abort_status_;
    } else {
      return;
    }
    writing_ = true;
  }
  if (end) {
    StartEnd(status);
  } else {
    StartWrite(buffer, more, &write_done_);
  }
}

void StreamCore::NextRead() {
  {
    absl::MutexLock lock(&mu_);
    with_sink_ = false;
    if (queued_bytes_ > PauseReadsAbove() && !broken_) {
      paused_ = true;
      return;
    }
  }
  read_buffer_.Clear();
  StartRead(&read_buffer_, &read_done_);
}

void StreamCore::OnReadDone(bool ok) {
  std::shared_ptr<StreamCore> self = shared_from_this();
  if (ok) {
    const absl::Status delivered = CatchExhausted("a message", [this] { return Deliver(); });
    if (!delivered.ok()) Abort(delivered);
    NextRead();
    return;
  }
  OnReadEnded();
  {
    absl::MutexLock lock(&mu_);
    reading_ = false;
  }
  MaybeClose();
}

absl::Status StreamCore::Deliver() {
  StreamSink* sink = nullptr;
  {
    absl::MutexLock lock(&mu_);
    with_sink_ = true;
    silent_ticks_ = 0;
    if (abort_status_.ok()) sink = sink_;
  }
  if (checks_ && IsAlive(read_buffer_)) return CheckAlive(read_buffer_, received_);
  GW_ASSIGN_OR_RETURN(Message message,
                      DecodeMessage(read_buffer_, checks_ ? std::optional<uint64_t>(received_) : std::nullopt));
  ++received_;
  read_buffer_.Clear();  // a message has left its memory when the next one is read: that is in this core's cache
  if (sink == nullptr) return absl::OkStatus();
  SinkScope scope(this);
  sink->OnMessage(std::move(message));
  return absl::OkStatus();
}

void StreamCore::Ended(absl::Status status) {
  std::shared_ptr<StreamCore> self = shared_from_this();
  {
    absl::MutexLock lock(&mu_);
    ended_ = broken_ = true;
    DropQueue();
    final_status_ = abort_status_.ok() ? std::move(status) : abort_status_;
  }
  MaybeClose();
}

void StreamCore::MaybeClose() {
  StreamSink* sink = nullptr;
  absl::Status status;
  {
    absl::MutexLock lock(&mu_);
    if (!ended_ || writing_ || reading_ || telling_ || closing_) return;
    closing_ = true;
    sink = sink_;
    status = final_status_;
  }
  if (sink != nullptr) {
    SinkScope scope(this);
    sink->OnClosed(std::move(status));
  }
  {
    absl::MutexLock lock(&mu_);
    closed_ = true;
    sink_ = nullptr;
  }
  OnCoreClosed();
}

}  // namespace gradwire::transport

// The state machine of one gRPC stream, shared by both ends: a bounded send queue with one write in flight, one read
// in flight unless the sink has a message, and one end. ClientStream and ServerStream supply the gRPC calls.
#pragma once

#include <grpcpp/impl/codegen/call_op_set.h>
#include <grpcpp/support/byte_buffer.h>

#include <deque>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/transport/poller.h"
#include "common/transport/transport.h"

namespace gradwire::transport {

// Thread-safe. Shared by its owner (channel or listener, until it is closed) and the Stream handle.
// Queue bound: window_bytes plus one message per blocked sender, plus what sinks send (see paused_). gRPC takes up to
// kWriteBufferBytes beyond it from a queue that has more.
class StreamCore : public std::enable_shared_from_this<StreamCore> {
 public:
  explicit StreamCore(size_t window_bytes);
  virtual ~StreamCore() = default;

  absl::Status Send(Message message) ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<bool> TrySend(Message& message) ABSL_LOCKS_EXCLUDED(mu_);
  void Finish(absl::Status status) ABSL_LOCKS_EXCLUDED(mu_);
  void Cancel() ABSL_LOCKS_EXCLUDED(mu_);
  // Ends the stream with `status` in place of what the peer or gRPC says; unsent messages are dropped. The first one
  // counts; Cancelled hurries the end that another one began.
  void Abort(absl::Status status) ABSL_LOCKS_EXCLUDED(mu_);
  // To be called every half of the keepalive time. With checks, gives and expects signs of life: gRPC's keepalive is
  // that of the connection, and a stream whose bytes went astray would wait for ever.
  void Tick() ABSL_LOCKS_EXCLUDED(mu_);
  // Destruction of the client's handle: cancels, then waits for the end, except inside the sink of this stream, where
  // the sink is dropped instead.
  void Abandon() ABSL_LOCKS_EXCLUDED(mu_);

 protected:
  // A message with more behind it need not be on the wire before the next is taken.
  static ::grpc::WriteOptions OptionsFor(bool more) {
    ::grpc::WriteOptions options;
    if (more) options.set_buffer_hint();
    return options;
  }
  // Each starts one operation and returns; its completion goes to the member named.
  virtual void StartRead(::grpc::ByteBuffer* buffer, Completion* done) = 0;
  // `more`: another message is queued behind this one.
  virtual void StartWrite(const ::grpc::ByteBuffer& buffer, bool more, Completion* done) = 0;
  // Everything queued was written after Finish. Client: half-close, completing as a write. Server: end with `status`.
  virtual void StartEnd(const absl::Status& status) = 0;
  // Client: cancels the call. Server: cancels it if `status` is Cancelled; any other is sent once a write in flight
  // ended.
  virtual void StartAbort(const absl::Status& status) = 0;
  // The read failed: nothing more will come. Client: asks for the status. Server: ends the stream.
  virtual void OnReadEnded() = 0;
  // What the stream is aborted with when its peer gives no sign of life.
  virtual absl::Status Lost(const std::string& why) const = 0;
  // Runs once, after OnClosed of the sink, as the very last thing.
  virtual void OnCoreClosed() = 0;
  // No read is wanted while more than this is queued to be sent (server only; SIZE_MAX for a client).
  virtual size_t PauseReadsAbove() const = 0;

  void set_sink(StreamSink* sink) ABSL_LOCKS_EXCLUDED(mu_);
  // Messages carry checks. Before anything is sent or read.
  void set_checks(bool checks) { checks_ = checks; }
  void BeginReading() ABSL_LOCKS_EXCLUDED(mu_);
  void BeginWriting() ABSL_LOCKS_EXCLUDED(mu_);
  // The final status is known and no operation but a read or write is in flight; closes when those are done.
  void Ended(absl::Status status) ABSL_LOCKS_EXCLUDED(mu_);
  Completion* write_done() { return &write_done_; }
  void OnWriteDone(bool ok) ABSL_LOCKS_EXCLUDED(mu_);
  // Peer is gone: unsent messages are dropped and senders released.
  void Break() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  static constexpr int kLostTicks = 4;

  // What a sender does where the window is full.
  enum class WhereFull { kWait, kQueue, kRefuse };
  // False: it is refused, and the message as it was.
  absl::StatusOr<bool> Queue(Message& message, WhereFull where_full) ABSL_LOCKS_EXCLUDED(mu_);
  void OnReadDone(bool ok) ABSL_LOCKS_EXCLUDED(mu_);
  // Gives the sink what was read. Errors: it was damaged on its way.
  absl::Status Deliver() ABSL_LOCKS_EXCLUDED(mu_);
  void NextRead() ABSL_LOCKS_EXCLUDED(mu_);
  // Starts the next write, or the end, if nothing is in flight.
  void Pump() ABSL_LOCKS_EXCLUDED(mu_);
  // Starts the read that was put off.
  void Resume() ABSL_LOCKS_EXCLUDED(mu_);
  // Tells the sink that asked for room, where there is some. MaybeClose is to follow.
  void TellOfRoom() ABSL_LOCKS_EXCLUDED(mu_);
  void MaybeClose() ABSL_LOCKS_EXCLUDED(mu_);
  void DropQueue() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool CanSend() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return queued_bytes_ <= window_bytes_ || broken_ || finish_requested_;
  }
  // What a sender that had to wait waits for: woken for every message, it would take turns with the poller's thread.
  bool HalfEmpty() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return queued_bytes_ <= window_bytes_ / 2 || broken_ || finish_requested_;
  }

  const size_t window_bytes_;
  bool checks_ = false;
  MemberCompletion<StreamCore> read_done_;
  MemberCompletion<StreamCore> write_done_;
  ::grpc::ByteBuffer read_buffer_;  // belongs to the read in flight
  uint64_t received_ = 0;           // messages; so does it

  absl::Mutex mu_;
  StreamSink* sink_ ABSL_GUARDED_BY(mu_) = nullptr;
  std::deque<::grpc::ByteBuffer> queue_ ABSL_GUARDED_BY(mu_);
  uint64_t sent_ ABSL_GUARDED_BY(mu_) = 0;        // messages
  size_t queued_bytes_ ABSL_GUARDED_BY(mu_) = 0;  // queue_ and the write in flight
  size_t in_flight_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  bool writing_ ABSL_GUARDED_BY(mu_) = true;     // a write is in flight, or writing has not begun
  bool reading_ ABSL_GUARDED_BY(mu_) = false;    // a read is in flight, or its message with the sink, or it is put off
  bool with_sink_ ABSL_GUARDED_BY(mu_) = false;  // a message is
  bool wrote_ ABSL_GUARDED_BY(mu_) = false;      // since the last tick
  int silent_ticks_ ABSL_GUARDED_BY(mu_) = 0;    // that a read has waited
  bool room_wanted_ ABSL_GUARDED_BY(mu_) = false;  // TrySend found none
  bool telling_ ABSL_GUARDED_BY(mu_) = false;      // the sink is being told of room
  bool paused_ ABSL_GUARDED_BY(mu_) = false;       // a server's read waits until the peer takes what sinks sent
  bool finish_requested_ ABSL_GUARDED_BY(mu_) = false;
  bool end_started_ ABSL_GUARDED_BY(mu_) = false;
  bool broken_ ABSL_GUARDED_BY(mu_) = false;  // nothing can be sent any more
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  bool closing_ ABSL_GUARDED_BY(mu_) = false;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status finish_status_ ABSL_GUARDED_BY(mu_);
  absl::Status abort_status_ ABSL_GUARDED_BY(mu_);
  absl::Status final_status_ ABSL_GUARDED_BY(mu_);
};

}  // namespace gradwire::transport

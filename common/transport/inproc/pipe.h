// One inproc stream: two directions, each a bounded queue drained by at most one closure at a time on the endpoint's
// executor, so the calls of one sink never overlap.
#pragma once

#include <deque>
#include <functional>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/transport/inproc/executor.h"
#include "common/transport/transport.h"

namespace gradwire::transport {

// Thread-safe. Kept alive by the two handles, the endpoint (until both sinks had OnClosed) and running deliveries.
class Pipe : public std::enable_shared_from_this<Pipe> {
 public:
  enum Side { kClient = 0, kServer = 1 };

  // `on_closed` runs once, after both sinks had OnClosed.
  Pipe(const Limits& client_limits, const Limits& server_limits, Executor* executor,
       std::function<void(Pipe*)> on_closed);

  // Accepts the stream on the executor, then starts deliveries. `sink` is the client's.
  void Open(Service* service, std::string method, StreamSink* sink) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Send(Side from, Message message) ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<bool> TrySend(Side from, Message& message) ABSL_LOCKS_EXCLUDED(mu_);
  void Finish(Side from, absl::Status status) ABSL_LOCKS_EXCLUDED(mu_);
  // Ends both directions at once.
  void Abort(absl::Status status) ABSL_LOCKS_EXCLUDED(mu_);
  // See StreamCore::Abandon: the client's handle is destroyed.
  void Abandon() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // What travels towards one side.
  struct Direction {
    size_t window_bytes = 0;
    size_t max_message_bytes = 0;
    StreamSink* sink = nullptr;
    std::deque<Message> queue;
    size_t queued_bytes = 0;
    bool ready = false;        // the sink may be called
    bool delivering = false;   // a closure is on its way or running
    bool finished = false;     // no more is queued; after the last message the sink is closed with `status`
    bool closing = false;      // OnClosed is or was called
    bool closed = false;       // OnClosed has returned
    bool room_wanted = false;  // TrySend found none; the other side's sink is to be told
    bool telling = false;      // `sink` is being told of room in the other direction
    absl::Status status;
  };

  void Accept(Service* service, const std::string& method) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Queue(Side from, Message message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool CanSend(Side to) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return to_[to].finished || to_[to].queued_bytes <= to_[to].window_bytes;
  }
  // Tells the sink of the side that asked for room towards `to`, where there is some.
  void TellOfRoom(Side to) ABSL_LOCKS_EXCLUDED(mu_);
  void Schedule(Side to) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Deliver(Side to) ABSL_LOCKS_EXCLUDED(mu_);
  // Takes the next step for `to`: a message, or its end. False when there is nothing to do now.
  bool Step(Side to) ABSL_LOCKS_EXCLUDED(mu_);
  void Close(Side to, StreamSink* sink) ABSL_LOCKS_EXCLUDED(mu_);
  void End(Side to, absl::Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Deliveries to the server wait while what its sink sent is above the window, as in the gRPC transport.
  bool Held(Side to) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Executor* const executor_;
  const std::function<void(Pipe*)> on_closed_;
  absl::Mutex mu_;
  Direction to_[2] ABSL_GUARDED_BY(mu_);
  std::shared_ptr<Stream> server_handle_;    // written before deliveries to the server begin, reset after OnClosed
  std::unique_ptr<StreamSink> server_sink_;  // likewise
};

class PipeHandle final : public Stream {
 public:
  PipeHandle(std::shared_ptr<Pipe> pipe, Pipe::Side side) : pipe_(std::move(pipe)), side_(side) {}
  ~PipeHandle() override {
    if (side_ == Pipe::kClient) pipe_->Abandon();
  }
  absl::Status Send(Message message) override { return pipe_->Send(side_, std::move(message)); }
  absl::StatusOr<bool> TrySend(Message& message) override { return pipe_->TrySend(side_, message); }
  void Finish(absl::Status status) override { pipe_->Finish(side_, std::move(status)); }
  void Cancel() override { pipe_->Abort(absl::CancelledError("the stream was cancelled")); }

 private:
  const std::shared_ptr<Pipe> pipe_;
  const Pipe::Side side_;
};

}  // namespace gradwire::transport

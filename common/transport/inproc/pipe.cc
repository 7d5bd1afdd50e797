// See pipe.h. Sinks and the service are called without the lock.
#include "common/transport/inproc/pipe.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/transport/sink_scope.h"

namespace gradwire::transport {
namespace {

size_t MessageBytes(const Message& message) { return message.control.size() + TotalSize(message.frame); }
Pipe::Side Other(Pipe::Side side) { return side == Pipe::kClient ? Pipe::kServer : Pipe::kClient; }

}  // namespace

Pipe::Pipe(const Limits& client_limits, const Limits& server_limits, Executor* executor,
           std::function<void(Pipe*)> on_closed)
    : executor_(executor), on_closed_(std::move(on_closed)) {
  absl::MutexLock lock(&mu_);
  to_[kServer].window_bytes = client_limits.send_window_bytes;
  to_[kServer].max_message_bytes = server_limits.max_message_bytes;
  to_[kClient].window_bytes = server_limits.send_window_bytes;
  to_[kClient].max_message_bytes = client_limits.max_message_bytes;
}

void Pipe::Open(Service* service, std::string method, StreamSink* sink) {
  {
    absl::MutexLock lock(&mu_);
    to_[kClient].sink = sink;
    to_[kClient].ready = true;
    to_[kServer].delivering = true;  // until it was accepted
  }
  executor_->Run([self = shared_from_this(), service, method = std::move(method)] { self->Accept(service, method); });
}

void Pipe::Accept(Service* service, const std::string& method) {
  server_handle_ = std::make_shared<PipeHandle>(shared_from_this(), kServer);
  absl::StatusOr<std::unique_ptr<StreamSink>> sink = absl::InternalError("not accepted");
  {
    SinkScope scope(&to_[kServer]);
    sink = service->Accept(method, server_handle_);
  }
  {
    absl::MutexLock lock(&mu_);
    if (sink.ok()) {
      server_sink_ = *std::move(sink);
      to_[kServer].sink = server_sink_.get();
    } else {
      End(kServer, sink.status());
      End(kClient, sink.status());
    }
    to_[kServer].ready = true;
  }
  Deliver(kServer);
}

bool Pipe::Held(Side to) const {
  return to == kServer && to_[kClient].queued_bytes > to_[kClient].window_bytes && !to_[kServer].finished;
}

absl::Status Pipe::Send(Side from, Message message) {
  const Side to = Other(from);
  absl::MutexLock lock(&mu_);
  const auto can_send = [this, to]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return CanSend(to); };
  if (!can_send() && !SinkScope::Any()) mu_.Await(absl::Condition(&can_send));
  return Queue(from, std::move(message));
}

absl::StatusOr<bool> Pipe::TrySend(Side from, Message& message) {
  const Side to = Other(from);
  absl::MutexLock lock(&mu_);
  if (!CanSend(to)) {
    to_[to].room_wanted = true;
    return false;
  }
  GW_RETURN_IF_ERROR(Queue(from, std::move(message)));
  return true;
}

absl::Status Pipe::Queue(Side from, Message message) {
  const Side to = Other(from);
  const size_t bytes = MessageBytes(message);
  Direction& d = to_[to];
  if (d.finished) {
    if (!d.status.ok()) return d.status;
    return absl::FailedPreconditionError("the stream has ended; open a new one");
  }
  if (bytes > d.max_message_bytes) {
    const absl::Status refused = absl::ResourceExhaustedError(
        absl::StrCat("a message of ", bytes, " bytes is larger than the receiver's limit of ", d.max_message_bytes,
                     "; send smaller chunks"));
    End(kServer, refused);
    End(kClient, refused);
    return refused;
  }
  d.queue.push_back(std::move(message));
  d.queued_bytes += bytes;
  Schedule(to);
  return absl::OkStatus();
}

void Pipe::Finish(Side from, absl::Status status) {
  absl::MutexLock lock(&mu_);
  Direction& d = to_[Other(from)];
  if (d.finished) return;
  d.finished = true;
  if (from == kServer) d.status = std::move(status);
  Schedule(Other(from));
}

void Pipe::Abort(absl::Status status) {
  absl::MutexLock lock(&mu_);
  End(kServer, status);
  End(kClient, status);
}

// Drops what is queued towards `to` and closes it with `status`, unless it has closed already.
void Pipe::End(Side to, absl::Status status) {
  Direction& d = to_[to];
  if (d.closed) return;
  d.queue.clear();
  d.queued_bytes = 0;
  d.finished = true;
  if (d.status.ok()) d.status = std::move(status);
  Schedule(to);
}

void Pipe::Abandon() {
  Abort(absl::CancelledError("the client dropped the stream"));
  absl::MutexLock lock(&mu_);
  LeaveSink(&to_[kClient], &to_[kClient].sink, &to_[kClient].closed, &mu_);
}

void Pipe::Schedule(Side to) {
  Direction& d = to_[to];
  if (d.delivering || !d.ready || d.closed) return;
  d.delivering = true;
  executor_->Run([self = shared_from_this(), to] { self->Deliver(to); });
}

void Pipe::Deliver(Side to) {
  while (Step(to)) {
  }
}

bool Pipe::Step(Side to) {
  Message message;
  StreamSink* sink = nullptr;
  bool end = false;
  {
    absl::MutexLock lock(&mu_);
    Direction& d = to_[to];
    if (d.closed || (d.queue.empty() && (!d.finished || d.telling)) || Held(to)) {
      d.delivering = false;
      return false;
    }
    sink = d.sink;
    end = d.closing = d.queue.empty();
    if (!end) {
      message = std::move(d.queue.front());
      d.queue.pop_front();
      d.queued_bytes -= MessageBytes(message);
      if (to == kClient) Schedule(kServer);  // it may have been held
    }
  }
  if (end) {
    Close(to, sink);
    return false;
  }
  TellOfRoom(to);
  if (sink != nullptr) {
    SinkScope scope(&to_[to]);
    message.Complete();
    sink->OnMessage(std::move(message));
  }
  return true;
}

void Pipe::TellOfRoom(Side to) {
  const Side from = Other(to);
  StreamSink* sink = nullptr;
  {
    absl::MutexLock lock(&mu_);
    Direction& d = to_[to];
    if (!d.room_wanted || d.finished || d.queued_bytes > d.window_bytes / 2) return;
    if (to_[from].closing || to_[from].closed) return;
    d.room_wanted = false;
    to_[from].telling = true;
    sink = to_[from].sink;
  }
  if (sink != nullptr) {
    SinkScope scope(&to_[from]);
    sink->OnRoom();
  }
  absl::MutexLock lock(&mu_);
  to_[from].telling = false;
  Schedule(from);
}

void Pipe::Close(Side to, StreamSink* sink) {
  absl::Status status;
  {
    absl::MutexLock lock(&mu_);
    status = to_[to].status;
    if (to == kClient) {
      End(kServer, status.ok() || absl::IsCancelled(status) ? status : absl::OkStatus());
    } else if (!to_[kClient].finished) {
      to_[kClient].finished = true;  // what the server has queued is still delivered
      Schedule(kClient);
    }
  }
  if (sink != nullptr) {
    SinkScope scope(&to_[to]);
    sink->OnClosed(std::move(status));
  }
  if (to == kServer) {
    server_sink_.reset();
    server_handle_.reset();
  }
  bool last = false;
  {
    absl::MutexLock lock(&mu_);
    to_[to].closed = true;
    last = to_[kClient].closed && to_[kServer].closed;
  }
  if (last) on_closed_(this);
}

}  // namespace gradwire::transport

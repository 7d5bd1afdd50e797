// The server end of the gRPC transport: raw asynchronous methods of the Worker and Operator services, forwarded to one
// transport::Service on the threads of a poller.
#include "common/transport/grpc/server.h"

#include <memory>
#include <utility>

#include "common/transport/grpc/message_codec.h"
#include "common/transport/grpc/status_codec.h"
#include "common/transport/sink_scope.h"

namespace gradwire::transport {

// ---- Unary calls ----

UnaryCall::UnaryCall(CallOwner* owner, RawService* service, int index)
    : owner_(owner),
      service_(service),
      index_(index),
      responder_(&context_),
      arrived_(this, &UnaryCall::OnArrived),
      finished_(this, &UnaryCall::OnFinished) {}

void UnaryCall::Request(::grpc::ServerCompletionQueue* queue) {
  service_->RequestUnary(index_, &context_, &request_, &responder_, queue, Tag(&arrived_));
}

void UnaryCall::OnArrived(bool ok) {
  if (!ok) {  // the server shuts down
    delete this;
    return;
  }
  if (!owner_->Arrived(service_, index_)) {
    responder_.FinishWithError(ToGrpc(ShuttingDown()), Tag(&finished_));
    return;
  }
  const std::string request = ToString(request_);
  request_.Clear();
  absl::StatusOr<std::string> reply = owner_->ServiceOf(service_)->Call(service_->method(index_), request);
  if (reply.ok()) {
    responder_.Finish(FromString(*reply), ::grpc::Status::OK, Tag(&finished_));
  } else {
    responder_.FinishWithError(ToGrpc(reply.status()), Tag(&finished_));
  }
}

void UnaryCall::OnFinished(bool) {
  CallOwner* owner = owner_;
  delete this;
  owner->Ended(nullptr);
}

// ---- Streams ----

ServerStream::ServerStream(CallOwner* owner, RawService* service, int index, const Limits& limits)
    : StreamCore(limits.send_window_bytes),
      owner_(owner),
      service_(service),
      index_(index),
      window_bytes_(limits.send_window_bytes),
      call_(&context_),
      arrived_(this, &ServerStream::OnArrived),
      done_(this, &ServerStream::OnDone),
      finished_(this, &ServerStream::OnFinished) {}

void ServerStream::Request(::grpc::ServerCompletionQueue* queue) {
  pending_ = shared_from_this();
  context_.AsyncNotifyWhenDone(Tag(&done_));
  service_->RequestStream(index_, &context_, &call_, queue, Tag(&arrived_));
}

void ServerStream::OnArrived(bool ok) {
  std::shared_ptr<StreamCore> self = std::move(pending_);
  if (!ok) return;  // the server shuts down; `done_` is not delivered for a call that never was
  const bool serving = owner_->Arrived(service_, index_);
  owner_->Started(self);
  if (!serving) {
    Abort(ShuttingDown());
  } else {
    handle_ = std::make_shared<StreamHandle>(self, /*abandon=*/false);
    SinkScope scope(this);
    absl::StatusOr<std::unique_ptr<StreamSink>> sink =
        owner_->ServiceOf(service_)->Accept(service_->method(index_), handle_);
    if (sink.ok()) {
      sink_storage_ = *std::move(sink);
      set_sink(sink_storage_.get());
    } else {
      Abort(sink.status());
    }
  }
  BeginWriting();
  BeginReading();
}

void ServerStream::OnDone(bool) {
  std::shared_ptr<StreamCore> self = shared_from_this();
  if (context_.IsCancelled()) {
    cancelled_.store(true);
    Break();
    Finish(absl::OkStatus());  // nobody reads it, but gRPC wants the call finished
  }
  OneOfTwo();
}

void ServerStream::OnFinished(bool) {
  std::shared_ptr<StreamCore> self = shared_from_this();
  OnWriteDone(true);
  OneOfTwo();
}

void ServerStream::OneOfTwo() {
  if (ends_.fetch_add(1) == 0) return;
  Ended(cancelled_.load() ? absl::CancelledError("the client cancelled the stream, or its connection was lost")
                          : absl::OkStatus());
}

void ServerStream::StartEnd(const absl::Status& status) { call_.Finish(ToGrpc(status), Tag(&finished_)); }

void ServerStream::StartAbort(const absl::Status& status) {
  if (absl::IsCancelled(status)) context_.TryCancel();
}

void ServerStream::OnCoreClosed() {
  sink_storage_.reset();
  handle_.reset();
  owner_->Ended(this);
}

}  // namespace gradwire::transport

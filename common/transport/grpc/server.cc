// The server end of the gRPC transport: raw asynchronous methods of the Worker and Operator services, forwarded to one
// transport::Service on the threads of a poller.
#include "common/transport/grpc/server.h"

#include <memory>
#include <utility>

#include "common/base/status_macros.h"
#include "common/transport/catch_exhausted.h"
#include "common/transport/grpc/message_codec.h"
#include "common/transport/grpc/status_codec.h"
#include "common/transport/sink_scope.h"
#include "common/transport/stream_handle.h"

namespace gradwire::transport {

namespace {

bool HasChecks(const ::grpc::ServerContext& context) {
  const auto& metadata = context.client_metadata();
  return metadata.find(kChecksKey) != metadata.end();
}

::grpc::Status WithCheck(const absl::Status& status, bool checks, ::grpc::ServerContext* context) {
  ::grpc::Status said = ToGrpc(status);
  if (checks) context->AddTrailingMetadata(kStatusCheckKey, StatusCheck(said.error_code(), said.error_message()));
  return said;
}

}  // namespace

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
  const bool serving = owner_->Arrived(service_, index_);  // first: whatever becomes of this call, there is a next one
  const absl::StatusOr<std::string> reply = CatchExhausted("a call", [&]() -> absl::StatusOr<std::string> {
    checks_ = HasChecks(context_);
    peer_ = owner_->CallBegan(context_.peer());
    if (!serving) return ShuttingDown();
    return Answer();
  });
  if (reply.ok()) {
    responder_.Finish(FromString(*reply), Said(absl::OkStatus()), Tag(&finished_));
  } else {
    responder_.FinishWithError(Said(reply.status()), Tag(&finished_));
  }
}

absl::StatusOr<std::string> UnaryCall::Answer() {
  std::string request = ToString(request_);
  request_.Clear();
  // To be tried again, as one that never came.
  if (checks_ ? !TakeCheck(0, 0, &request).ok() : EndsWithCheck(request))
    return absl::UnavailableError("the request was damaged on its way");
  absl::StatusOr<std::string> reply = owner_->ServiceOf(service_)->Call(service_->method(index_), request);
  if (reply.ok() && checks_) AppendCheck(&*reply);
  return reply;
}

::grpc::Status UnaryCall::Said(const absl::Status& status) { return WithCheck(status, checks_, &context_); }

void UnaryCall::OnFinished(bool) {
  CallOwner* owner = owner_;
  owner->CallEnded(peer_);
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
  alive_ = shared_from_this();
  context_.AsyncNotifyWhenDone(Tag(&done_));
  service_->RequestStream(index_, &context_, &call_, queue, Tag(&arrived_));
}

void ServerStream::OnArrived(bool ok) {
  std::shared_ptr<StreamCore> self = alive_;
  if (!ok) {  // the server shuts down; `done_` is not delivered for a call that never was
    alive_.reset();
    return;
  }
  const bool serving =
      owner_->Arrived(service_, index_);  // first: whatever becomes of this stream, there is a next one
  const absl::Status started = CatchExhausted("a stream", [&] {
    checks_ = HasChecks(context_);
    set_checks(checks_);
    peer_ = owner_->CallBegan(context_.peer());
    return owner_->Started(self);
  });
  if (!serving) {
    Abort(ShuttingDown());
  } else if (!started.ok()) {
    Abort(started);
  } else {
    Accept();
  }
  // Reading first: a stream that is refused ends as soon as it may write, but not before its read began.
  BeginReading();
  BeginWriting();
}

void ServerStream::Accept() {
  const absl::Status accepted = CatchExhausted("a stream", [this]() -> absl::Status {
    handle_ = std::make_shared<StreamHandle<StreamCore>>(shared_from_this(), /*abandon=*/false);
    const SinkScope scope(this);
    GW_ASSIGN_OR_RETURN(sink_storage_, owner_->ServiceOf(service_)->Accept(service_->method(index_), handle_));
    return absl::OkStatus();
  });
  if (!accepted.ok()) return Abort(accepted);
  set_sink(sink_storage_.get());
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

void ServerStream::StartEnd(const absl::Status& status) {
  call_.Finish(WithCheck(status, checks_, &context_), Tag(&finished_));
}

void ServerStream::StartAbort(const absl::Status& status) {
  if (absl::IsCancelled(status)) context_.TryCancel();
}

void ServerStream::OnCoreClosed() {
  const std::shared_ptr<StreamCore> last = std::move(alive_);
  sink_storage_.reset();
  handle_.reset();
  owner_->CallEnded(peer_);
  owner_->Ended(this);
}

}  // namespace gradwire::transport

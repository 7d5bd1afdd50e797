// One RPC at the server: a unary call and a stream. The listener (listener.cc) asks for them and counts them.
#pragma once

#include <grpcpp/server_context.h>

#include <atomic>
#include <memory>
#include <utility>

#include "common/transport/grpc/grpc_queue.h"
#include "common/transport/grpc/raw_service.h"
#include "common/transport/grpc/stream_core.h"
#include "common/transport/transport.h"

namespace gradwire::transport {

inline absl::Status ShuttingDown() {
  return absl::UnavailableError("the server is shutting down; retry, its replacement may be starting");
}

// What calls need of their listener. Thread-safe.
class CallOwner {
 public:
  virtual ~CallOwner() = default;
  // Who answers the methods of `raw`.
  virtual Service* ServiceOf(RawService* raw) = 0;
  // A call of this method came in: asks for the next one. Counted until Ended. False when the listener shuts down.
  virtual bool Arrived(RawService* service, int index) = 0;
  // Knows of the stream until Ended. ResourceExhausted: there are more than there may be, it is to end.
  virtual absl::Status Started(std::shared_ptr<StreamCore> stream) = 0;
  virtual void Ended(StreamCore* stream_or_null) = 0;
  // Around a call: of what gRPC calls its peer; then of what CallBegan has returned, or "" where it was not called. Its
  // end needs no memory.
  virtual std::string CallBegan(const std::string& peer) = 0;
  virtual void CallEnded(const std::string& name) = 0;
};

// Owns itself from Request to its last completion.
class UnaryCall final {
 public:
  UnaryCall(CallOwner* owner, RawService* service, int index);
  void Request(::grpc::ServerCompletionQueue* queue);

 private:
  void OnArrived(bool ok);
  void OnFinished(bool ok);

  CallOwner* const owner_;
  RawService* const service_;
  const int index_;
  // What answers the request.
  absl::StatusOr<std::string> Answer();
  // With its check, if the call has them.
  ::grpc::Status Said(const absl::Status& status);

  bool checks_ = false;
  std::string peer_;
  ::grpc::ServerContext context_;
  ::grpc::ByteBuffer request_;
  RawService::Unary responder_;
  MemberCompletion<UnaryCall> arrived_;
  MemberCompletion<UnaryCall> finished_;
};

// Ends when the call's two last completions came: `finished_` of our Finish and `done_` of the call.
class ServerStream final : public StreamCore {
 public:
  ServerStream(CallOwner* owner, RawService* service, int index, const Limits& limits);
  void Request(::grpc::ServerCompletionQueue* queue);

 private:
  void StartRead(::grpc::ByteBuffer* buffer, Completion* done) override { call_.Read(buffer, Tag(done)); }
  void StartWrite(const ::grpc::ByteBuffer& buffer, bool more, Completion* done) override {
    // The first one takes gRPC's headers along: with the hint they would wait until something else is written.
    const bool begun = std::exchange(begun_, true);
    call_.Write(buffer, OptionsFor(more && begun), Tag(done));
  }
  void StartEnd(const absl::Status& status) override;
  void StartAbort(const absl::Status& status) override;
  // The client half-closed or is gone: what is queued is sent, then the stream ends. Clients of a method that streams
  // downwards only half-close at once; such a stream goes on until they cancel.
  void OnReadEnded() override {
    if (service_->kind(index_) != RawService::Kind::kServerStream) Finish(absl::OkStatus());
  }
  void OnCoreClosed() override;
  size_t PauseReadsAbove() const override { return window_bytes_; }
  // Cancels the call: a status might not get through either.
  absl::Status Lost(const std::string& why) const override { return absl::CancelledError(why); }

  void OnArrived(bool ok);
  void OnDone(bool ok);
  void OnFinished(bool ok);
  void OneOfTwo();
  void Accept();

  CallOwner* const owner_;
  RawService* const service_;
  const int index_;
  const size_t window_bytes_;
  ::grpc::ServerContext context_;
  RawService::Stream call_;
  MemberCompletion<ServerStream> arrived_;
  MemberCompletion<ServerStream> done_;
  MemberCompletion<ServerStream> finished_;
  bool checks_ = false;
  bool begun_ = false;  // to write; of the thread that does
  std::string peer_;
  std::shared_ptr<StreamCore> alive_;  // this one, from Request until it was closed
  std::shared_ptr<Stream> handle_;
  std::unique_ptr<StreamSink> sink_storage_;
  std::atomic<bool> cancelled_ = false;
  std::atomic<int> ends_ = 0;
};

}  // namespace gradwire::transport

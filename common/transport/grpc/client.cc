// The client end of the gRPC transport: a generic stub over ByteBuffers. Streams are driven by the channel's poller;
// unary calls wait on a completion queue of their own, so the calling thread does its own polling.
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/transport/catch_exhausted.h"
#include "common/transport/grpc/grpc_options.h"
#include "common/transport/grpc/grpc_queue.h"
#include "common/transport/grpc/grpc_transport.h"
#include "common/transport/grpc/message_codec.h"
#include "common/transport/grpc/status_codec.h"
#include "common/transport/grpc/stream_core.h"
#include "common/transport/poller.h"
#include "common/transport/stream_handle.h"
#include "common/transport/ticker.h"

namespace gradwire::transport {
namespace {

// The server itself says what the call ended with, and nothing of it was damaged on its way.
bool SaidByServer(const ::grpc::Status& status, const ::grpc::ClientContext& context) {
  const auto& metadata = context.GetServerTrailingMetadata();
  const auto check = metadata.find(kStatusCheckKey);
  return check != metadata.end() && std::string_view(check->second.data(), check->second.size()) ==
                                        StatusCheck(status.error_code(), status.error_message());
}

// What a call ended with. gRPC's own statuses carry no check; those that speak of a connection that cannot be made
// sense of are Unavailable: it was damaged on its way, and may be tried again.
absl::Status CheckedStatus(const ::grpc::Status& status, const ::grpc::ClientContext& context) {
  const absl::Status said = FromGrpc(status);
  if (SaidByServer(status, context)) return said;
  const bool of_grpc = absl::IsCancelled(said) || absl::IsDeadlineExceeded(said) || absl::IsUnavailable(said) ||
                       absl::IsResourceExhausted(said) || absl::IsUnimplemented(said);
  if (!context.GetServerTrailingMetadata().contains(kStatusCheckKey) && of_grpc) return said;
  return absl::UnavailableError(
      absl::StrCat("the end of a call was damaged on its way, or the server is older than this program (",
                   absl::StatusCodeToString(said.code()), said.ok() ? "" : ": ", std::string(said.message()), ")"));
}

// It may have ended so because header tables were damaged, which serve all calls of a connection: gRPC says
// Unimplemented for a path that it cannot read. A connection that is lost or cut ends by itself.
bool SpoilsConnection(const ::grpc::Status& status, const ::grpc::ClientContext& context) {
  const absl::Status said = FromGrpc(status);
  const bool lost = absl::IsCancelled(said) || absl::IsDeadlineExceeded(said) || absl::IsUnavailable(said);
  return !lost && !SaidByServer(status, context);
}

class ClientStream;

// Where open streams are kept alive. Thread-safe.
class StreamOwner {
 public:
  virtual ~StreamOwner() = default;
  virtual void Release(StreamCore* stream) = 0;
  // No further call goes over the connection of this stub.
  virtual void LeaveConnection(const ::grpc::GenericStub* stub) = 0;
};

class ClientStream final : public StreamCore {
 public:
  ClientStream(const Limits& limits, bool checks, StreamOwner* owner, StreamSink* sink)
      : StreamCore(limits.send_window_bytes),
        checks_(checks),
        owner_(owner),
        started_(this, &ClientStream::OnStarted),
        finished_(this, &ClientStream::OnFinished) {
    set_sink(sink);
    set_checks(checks_);
    if (checks_) context_.AddMetadata(kChecksKey, "1");
  }

  void Start(std::shared_ptr<::grpc::GenericStub> stub, const std::string& method, ::grpc::CompletionQueue* queue) {
    stub_ = std::move(stub);
    call_ = stub_->PrepareCall(&context_, method, queue);
    call_->StartCall(Tag(&started_));
  }

 private:
  void StartRead(::grpc::ByteBuffer* buffer, Completion* done) override { call_->Read(buffer, Tag(done)); }
  void StartWrite(const ::grpc::ByteBuffer& buffer, bool more, Completion* done) override {
    call_->Write(buffer, OptionsFor(more), Tag(done));
  }
  void StartEnd(const absl::Status&) override { call_->WritesDone(Tag(write_done())); }
  void StartAbort(const absl::Status& why) override {
    // A server that made no sense of the call's headers says nothing on the stream.
    if (checks_ && absl::IsUnavailable(why)) owner_->LeaveConnection(stub_.get());
    context_.TryCancel();
  }
  void OnReadEnded() override { call_->Finish(&status_, Tag(&finished_)); }
  void OnCoreClosed() override { owner_->Release(this); }
  size_t PauseReadsAbove() const override { return SIZE_MAX; }
  absl::Status Lost(const std::string& why) const override { return absl::UnavailableError(why); }

  void OnStarted(bool ok) {
    std::shared_ptr<StreamCore> self = shared_from_this();
    if (ok) {
      BeginWriting();
      BeginReading();
    } else {
      OnWriteDone(false);
      OnReadEnded();
    }
  }
  void OnFinished(bool) {
    if (checks_ && SpoilsConnection(status_, context_)) owner_->LeaveConnection(stub_.get());
    Ended(checks_ ? CheckedStatus(status_, context_) : FromGrpc(status_));
  }

  const bool checks_;
  StreamOwner* const owner_;
  std::shared_ptr<::grpc::GenericStub> stub_;
  ::grpc::ClientContext context_;
  std::unique_ptr<::grpc::GenericClientAsyncReaderWriter> call_;
  ::grpc::Status status_;
  MemberCompletion<ClientStream> started_;
  MemberCompletion<ClientStream> finished_;
};

// The queue of all channels of this process, and its poller. gRPC polls all sockets of a process together: with a queue
// for each channel their threads would receive and send for one another, and hand on what they find by a third.
class ClientQueue {
 public:
  // Lives as long as somebody holds it. Thread-safe.
  static std::shared_ptr<ClientQueue> OfProcess() {
    static absl::Mutex mu;
    static std::weak_ptr<ClientQueue> current;
    absl::MutexLock lock(&mu);
    std::shared_ptr<ClientQueue> queue = current.lock();
    if (queue == nullptr) current = queue = std::make_shared<ClientQueue>();
    return queue;
  }

  ::grpc::CompletionQueue* queue() { return &queue_; }
  Poller& poller() { return poller_; }

 private:
  ::grpc::CompletionQueue queue_;
  GrpcQueue poller_queue_{&queue_};
  Poller poller_{&poller_queue_, 0};
};

class GrpcChannel final : public Channel, public StreamOwner {
 public:
  // `connect`: makes a channel with a connection of its own.
  GrpcChannel(std::function<std::shared_ptr<::grpc::Channel>()> connect, const Limits& limits, bool checks)
      : limits_(limits),
        checks_(checks),
        connect_(std::move(connect)),
        queue_(ClientQueue::OfProcess()),
        ticker_(queue_->queue(), std::max<int64_t>(limits.keepalive_ms / 2, 1), [this] { Tick(); }) {}

  ~GrpcChannel() override {
    ticker_.Stop();
    std::vector<std::shared_ptr<ClientStream>> streams;
    {
      absl::MutexLock lock(&mu_);
      for (auto& [key, stream] : streams_) streams.push_back(stream);
    }
    for (auto& stream : streams) stream->Cancel();
    streams.clear();
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(this, &GrpcChannel::Empty));
  }

  absl::StatusOr<std::string> Call(Method method, std::string request, int64_t timeout_ms) override {
    ::grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(timeout_ms));
    if (checks_) {
      context.AddMetadata(kChecksKey, "1");
      AppendCheck(&request);
    }
    ::grpc::CompletionQueue queue;
    ::grpc::ByteBuffer reply;
    ::grpc::Status status;
    const std::shared_ptr<::grpc::GenericStub> stub = Stub();
    auto call = stub->PrepareUnaryCall(&context, Path(method), FromString(request), &queue);
    call->StartCall();
    call->Finish(&reply, &status, nullptr);
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    queue.Shutdown();
    while (queue.Next(&tag, &ok)) {
    }
    if (!checks_) {
      if (!status.ok()) return FromGrpc(status);
      return ToString(reply);
    }
    if (SpoilsConnection(status, context)) LeaveConnection(stub.get());
    GW_RETURN_IF_ERROR(CheckedStatus(status, context));
    std::string checked = ToString(reply);
    // Whether the server did it is not known then, as behind a lost connection.
    if (!TakeCheck(0, 0, &checked).ok()) return absl::UnavailableError("the reply was damaged on its way");
    return checked;
  }

  absl::StatusOr<std::unique_ptr<Stream>> Open(Method method, StreamSink* sink) override {
    auto stream = std::make_shared<ClientStream>(limits_, checks_, this, sink);
    {
      absl::MutexLock lock(&mu_);
      streams_.emplace(stream.get(), stream);
    }
    const absl::Status started = CatchExhausted("a stream", [&] {
      stream->Start(Stub(), Path(method), queue_->queue());
      return absl::OkStatus();
    });
    if (!started.ok()) {  // nothing of it is under way
      Release(stream.get());
      return started;
    }
    return std::make_unique<StreamHandle<StreamCore>>(std::move(stream), /*abandon=*/true);
  }

  bool Poll() override {
    queue_->poller().RunReady();
    return true;
  }
  void StopPolling() override { queue_->poller().HandBack(); }

 private:
  static std::string Path(Method method) { return absl::StrCat("/", std::string(method)); }
  bool Empty() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return streams_.empty(); }
  void Tick() {
    std::vector<std::shared_ptr<ClientStream>> streams;
    {
      absl::MutexLock lock(&mu_);
      for (auto& [key, stream] : streams_) streams.push_back(stream);
    }
    for (auto& stream : streams) stream->Tick();
  }
  void LeaveConnection(const ::grpc::GenericStub* stub) override {
    absl::MutexLock lock(&mu_);
    if (stub_.get() == stub) stub_ = nullptr;  // who still uses it keeps it
  }
  std::shared_ptr<::grpc::GenericStub> Stub() {
    absl::MutexLock lock(&mu_);
    if (stub_ == nullptr) stub_ = std::make_shared<::grpc::GenericStub>(connect_());
    return stub_;
  }
  void Release(StreamCore* stream) override {
    absl::MutexLock lock(&mu_);
    streams_.erase(stream);
  }

  const Limits limits_;
  const bool checks_;
  const std::function<std::shared_ptr<::grpc::Channel>()> connect_;
  const std::shared_ptr<ClientQueue> queue_;
  absl::Mutex mu_;
  std::shared_ptr<::grpc::GenericStub> stub_ ABSL_GUARDED_BY(mu_);  // null: the next call connects
  std::unordered_map<StreamCore*, std::shared_ptr<ClientStream>> streams_ ABSL_GUARDED_BY(mu_);
  Ticker<GrpcTimer> ticker_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<Channel>> DialGrpc(const Address& address, const Limits& limits, bool checks) {
  KeepGrpcInitialised();
  ::grpc::ChannelArguments arguments;
  ForEachGrpcArgument(limits, [&](const char* name, int value) { arguments.SetInt(name, value); });
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // one connection per channel
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);             // it skips large messages silently; callers retry
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  const std::string target = address.scheme == Scheme::kUnix ? absl::StrCat("unix:", address.name)
                                                             : address.ToString().substr(sizeof("grpc://") - 1);
  auto connect = [target, arguments] {
    return ::grpc::CreateCustomChannel(target, ::grpc::InsecureChannelCredentials(), arguments);
  };
  return std::make_shared<GrpcChannel>(std::move(connect), limits, checks);
}

}  // namespace gradwire::transport

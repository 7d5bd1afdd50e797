// The client end of the gRPC transport: a generic stub over ByteBuffers. Streams are driven by the channel's poller;
// unary calls wait on a completion queue of their own, so the calling thread does its own polling.
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <chrono>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/transport/grpc/grpc_options.h"
#include "common/transport/grpc/grpc_queue.h"
#include "common/transport/grpc/grpc_transport.h"
#include "common/transport/grpc/message_codec.h"
#include "common/transport/grpc/status_codec.h"
#include "common/transport/grpc/stream_core.h"
#include "common/transport/poller.h"

namespace gradwire::transport {
namespace {

class ClientStream;

// Where open streams are kept alive. Thread-safe.
class StreamOwner {
 public:
  virtual ~StreamOwner() = default;
  virtual void Release(StreamCore* stream) = 0;
};

class ClientStream final : public StreamCore {
 public:
  ClientStream(size_t window_bytes, StreamOwner* owner, StreamSink* sink)
      : StreamCore(window_bytes),
        owner_(owner),
        started_(this, &ClientStream::OnStarted),
        finished_(this, &ClientStream::OnFinished) {
    set_sink(sink);
  }

  void Start(::grpc::GenericStub* stub, const std::string& method, ::grpc::CompletionQueue* queue) {
    call_ = stub->PrepareCall(&context_, method, queue);
    call_->StartCall(Tag(&started_));
  }

 private:
  void StartRead(::grpc::ByteBuffer* buffer, Completion* done) override { call_->Read(buffer, Tag(done)); }
  void StartWrite(const ::grpc::ByteBuffer& buffer, bool more, Completion* done) override {
    call_->Write(buffer, OptionsFor(more), Tag(done));
  }
  void StartEnd(const absl::Status&) override { call_->WritesDone(Tag(write_done())); }
  void StartAbort(const absl::Status&) override { context_.TryCancel(); }
  void OnReadEnded() override { call_->Finish(&status_, Tag(&finished_)); }
  void OnCoreClosed() override { owner_->Release(this); }
  size_t PauseReadsAbove() const override { return SIZE_MAX; }

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
  void OnFinished(bool) { Ended(FromGrpc(status_)); }

  StreamOwner* const owner_;
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
  GrpcChannel(std::shared_ptr<::grpc::Channel> channel, const Limits& limits)
      : limits_(limits), stub_(std::move(channel)), queue_(ClientQueue::OfProcess()) {}

  ~GrpcChannel() override {
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
    ::grpc::CompletionQueue queue;
    ::grpc::ByteBuffer reply;
    ::grpc::Status status;
    auto call = stub_.PrepareUnaryCall(&context, Path(method), FromString(request), &queue);
    call->StartCall();
    call->Finish(&reply, &status, nullptr);
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    queue.Shutdown();
    while (queue.Next(&tag, &ok)) {
    }
    if (!status.ok()) return FromGrpc(status);
    return ToString(reply);
  }

  absl::StatusOr<std::unique_ptr<Stream>> Open(Method method, StreamSink* sink) override {
    auto stream = std::make_shared<ClientStream>(limits_.send_window_bytes, this, sink);
    {
      absl::MutexLock lock(&mu_);
      streams_.emplace(stream.get(), stream);
    }
    stream->Start(&stub_, Path(method), queue_->queue());
    return std::make_unique<StreamHandle>(std::move(stream), /*abandon=*/true);
  }

  bool Poll() override {
    queue_->poller().RunReady();
    return true;
  }
  void StopPolling() override { queue_->poller().HandBack(); }

 private:
  static std::string Path(Method method) { return absl::StrCat("/", std::string(method)); }
  bool Empty() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return streams_.empty(); }
  void Release(StreamCore* stream) override {
    absl::MutexLock lock(&mu_);
    streams_.erase(stream);
  }

  const Limits limits_;
  ::grpc::GenericStub stub_;
  const std::shared_ptr<ClientQueue> queue_;
  absl::Mutex mu_;
  std::unordered_map<StreamCore*, std::shared_ptr<ClientStream>> streams_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

absl::StatusOr<std::shared_ptr<Channel>> DialGrpc(const Address& address, const Limits& limits) {
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
  auto channel = ::grpc::CreateCustomChannel(target, ::grpc::InsecureChannelCredentials(), arguments);
  return std::make_shared<GrpcChannel>(std::move(channel), limits);
}

}  // namespace gradwire::transport

// The listener of the gRPC transport: builds the gRPC server, keeps one request per method outstanding, and shuts down
// in an order gRPC accepts.
#include <google/protobuf/descriptor.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <algorithm>
#include <chrono>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/transport/catch_exhausted.h"
#include "common/transport/grpc/acceptor.h"
#include "common/transport/grpc/builtin_services.h"
#include "common/transport/grpc/grpc_options.h"
#include "common/transport/grpc/grpc_transport.h"
#include "common/transport/grpc/server.h"
#include "common/transport/ticker.h"
#include "gradwire/v1/operator.pb.h"
#include "gradwire/v1/peer.pb.h"
#include "gradwire/v1/replication.pb.h"
#include "gradwire/v1/worker.pb.h"

namespace gradwire::transport {
namespace {

constexpr int kMaxConcurrentStreams = 256;  // per connection
constexpr int kIdleMs = 600'000;            // a connection without calls is closed
constexpr std::chrono::milliseconds kShutdownGrace(500);
constexpr TimeNs kNsPerUs = 1000;

class GrpcListener final : public Listener, public CallOwner {
 public:
  GrpcListener(Service* service, const Limits& limits, const Caps& caps)
      : service_(service),
        limits_(limits),
        caps_(caps),
        worker_(v1::WorkerIdentity::descriptor()->file()->service(0)),
        operator_(v1::CreateJobRequest::descriptor()->file()->service(0)),
        health_(kHealthName, {{"Check", Kind::kUnary}, {"Watch", Kind::kServerStream}}),
        reflection_(kReflectionName, {{"ServerReflectionInfo", Kind::kStream}}),
        reflection_alpha_(kReflectionAlphaName, {{"ServerReflectionInfo", Kind::kStream}}),
        replication_(v1::FenceRequest::descriptor()->file()->service(0)),
        peer_(v1::ExchangeRequest::descriptor()->file()->service(0)),
        builtin_({worker_.name(), operator_.name(), replication_.name(), peer_.name()}) {}
  ~GrpcListener() override;

  absl::Status Start(const Address& address);
  std::string address() const override { return address_; }
  void SetServing(bool serving) override { builtin_.SetServing(serving); }

 private:
  using Kind = RawService::Kind;

  Service* ServiceOf(RawService* raw) override {
    const bool ours = raw == &worker_ || raw == &operator_ || raw == &replication_ || raw == &peer_;
    return ours ? service_ : &builtin_;
  }
  bool Arrived(RawService* service, int index) override;
  absl::Status Started(std::shared_ptr<StreamCore> stream) override;
  void Ended(StreamCore* stream) override;
  std::string CallBegan(const std::string& peer) override { return acceptor_->CallBegan(peer); }
  void CallEnded(const std::string& name) override { acceptor_->CallEnded(name); }
  void Request(RawService* service, int index);
  // Where there is no memory for it now, the next tick asks for the call.
  void RequestOrRemember(RawService* service, int index) ABSL_LOCKS_EXCLUDED(mu_);
  void Tick();
  bool Idle() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return calls_ == 0; }

  Service* const service_;
  const Limits limits_;
  const Caps caps_;
  RawService worker_;
  RawService operator_;
  RawService health_;
  RawService reflection_;
  RawService reflection_alpha_;
  RawService replication_;
  RawService peer_;
  BuiltinServices builtin_;
  std::string address_;
  std::unique_ptr<Acceptor> acceptor_;
  std::unique_ptr<::grpc::ServerCompletionQueue> queue_;
  std::unique_ptr<GrpcQueue> poller_queue_;
  std::unique_ptr<::grpc::Server> server_;
  std::unique_ptr<Poller> poller_;
  std::unique_ptr<Ticker<GrpcTimer>> ticker_;
  absl::Mutex mu_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  int calls_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<std::pair<RawService*, int>> missing_ ABSL_GUARDED_BY(mu_);  // methods that nobody waits for calls of
  std::unordered_map<StreamCore*, std::shared_ptr<StreamCore>> streams_ ABSL_GUARDED_BY(mu_);
};

absl::Status GrpcListener::Start(const Address& address) {
  GW_ASSIGN_OR_RETURN(acceptor_, Acceptor::Listen(address, caps_));
  KeepGrpcInitialised();
  ::grpc::ServerBuilder builder;
  ForEachGrpcArgument(limits_, [&](const char* name, int value) { builder.AddChannelArgument(name, value); });
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxConcurrentStreams);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 100);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, static_cast<int>(2 * limits_.keepalive_ms));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kIdleMs);
  using FromFd = ::grpc::ServerBuilder::experimental_type::ExternalConnectionType;
  std::shared_ptr<::grpc::experimental::ExternalConnectionAcceptor> connections =
      builder.experimental().AddExternalConnectionAcceptor(FromFd::FROM_FD, ::grpc::InsecureServerCredentials());
  const auto services = {&worker_, &operator_, &replication_, &peer_, &health_, &reflection_, &reflection_alpha_};
  for (RawService* service : services) builder.RegisterService(service);
  queue_ = builder.AddCompletionQueue();
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) {  // the destructor shuts the queue down
    return absl::UnavailableError(
        absl::StrCat("gRPC cannot serve ", address.ToString(), "; GRPC_VERBOSITY=ERROR tells why"));
  }
  address_ = acceptor_->address().ToString();
  SetServing(true);
  size_t methods = 0;
  for (RawService* service : services) {
    methods += static_cast<size_t>(service->method_count());
    for (int i = 0; i < service->method_count(); ++i) Request(service, i);
  }
  {
    absl::MutexLock lock(&mu_);
    missing_.reserve(methods);
  }
  poller_queue_ = std::make_unique<GrpcQueue>(queue_.get());
  poller_ = std::make_unique<Poller>(poller_queue_.get(), limits_.spin_us * kNsPerUs);
  ticker_ = std::make_unique<Ticker<GrpcTimer>>(queue_.get(), std::max<int64_t>(limits_.keepalive_ms / 2, 1),
                                                [this] { Tick(); });
  return acceptor_->Start([connections](int listener, int socket) {
    ::grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
    connection.listener_fd = listener;
    connection.fd = socket;
    connections->HandleNewConnection(&connection);
  });
}

GrpcListener::~GrpcListener() {
  if (acceptor_ != nullptr) acceptor_->Stop();
  if (ticker_ != nullptr) ticker_->Stop();
  std::vector<std::shared_ptr<StreamCore>> streams;
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
    for (auto& [key, stream] : streams_) streams.push_back(stream);
  }
  for (auto& stream : streams) stream->Abort(ShuttingDown());
  streams.clear();
  // Peers that take their status have gone when this returns; the calls of the others are cancelled.
  if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now() + kShutdownGrace);
  {
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(this, &GrpcListener::Idle));
  }
  if (poller_ != nullptr) {
    poller_.reset();
  } else if (queue_ != nullptr) {
    queue_->Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue_->Next(&tag, &ok)) {
    }
  }
}

void GrpcListener::Tick() {
  std::vector<std::shared_ptr<StreamCore>> streams;
  std::vector<std::pair<RawService*, int>> missing;
  {
    absl::MutexLock lock(&mu_);
    for (auto& [key, stream] : streams_) streams.push_back(stream);
    missing = missing_;
    missing_.clear();
    if (stopping_) missing.clear();
  }
  for (auto& stream : streams) stream->Tick();
  for (const auto& [service, index] : missing) RequestOrRemember(service, index);
}

void GrpcListener::Request(RawService* service, int index) {
  if (service->kind(index) != Kind::kUnary) {
    std::make_shared<ServerStream>(this, service, index, limits_)->Request(queue_.get());
  } else {
    (new UnaryCall(this, service, index))->Request(queue_.get());
  }
}

bool GrpcListener::Arrived(RawService* service, int index) {
  {
    absl::MutexLock lock(&mu_);
    ++calls_;
    if (stopping_) return false;
  }
  RequestOrRemember(service, index);
  return true;
}

void GrpcListener::RequestOrRemember(RawService* service, int index) {
  const absl::Status requested = CatchExhausted("a call", [&] {
    Request(service, index);
    return absl::OkStatus();
  });
  if (requested.ok()) return;
  absl::MutexLock lock(&mu_);
  missing_.push_back({service, index});  // there is room for every method
}

absl::Status GrpcListener::Started(std::shared_ptr<StreamCore> stream) {
  bool stopping = false;
  bool too_many = false;
  {
    absl::MutexLock lock(&mu_);
    streams_.emplace(stream.get(), stream);
    stopping = stopping_;
    too_many = streams_.size() > static_cast<size_t>(caps_.max_streams);
  }
  if (stopping) stream->Abort(ShuttingDown());
  if (!too_many) return absl::OkStatus();
  acceptor_->Warn(absl::StrCat(address_, ": a stream was refused: ", caps_.max_streams,
                               " are open, as many as there may be (--max-streams)"));
  return absl::ResourceExhaustedError(
      "this server has as many streams open as it may have (--max-streams): end others, or try later");
}

void GrpcListener::Ended(StreamCore* stream) {
  absl::MutexLock lock(&mu_);
  if (stream != nullptr) streams_.erase(stream);
  --calls_;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Listener>> ListenGrpc(const Address& address, Service* service, const Limits& limits,
                                                     const Caps& caps) {
  auto listener = std::make_unique<GrpcListener>(service, limits, caps);
  absl::Status started = listener->Start(address);
  if (!started.ok()) return started;
  return listener;
}

}  // namespace gradwire::transport

// The listener of the gRPC transport: builds the gRPC server, keeps one request per method outstanding, and shuts down
// in an order gRPC accepts.
#include <arpa/inet.h>
#include <google/protobuf/descriptor.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <netdb.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/transport/grpc/builtin_services.h"
#include "common/transport/grpc/grpc_options.h"
#include "common/transport/grpc/grpc_transport.h"
#include "common/transport/grpc/server.h"
#include "gradwire/v1/operator.pb.h"
#include "gradwire/v1/peer.pb.h"
#include "gradwire/v1/replication.pb.h"
#include "gradwire/v1/worker.pb.h"

namespace gradwire::transport {
namespace {

constexpr int kMaxConcurrentStreams = 4096;  // per connection
constexpr std::chrono::milliseconds kShutdownGrace(500);
constexpr TimeNs kNsPerUs = 1000;

class GrpcListener final : public Listener, public CallOwner {
 public:
  GrpcListener(Service* service, const Limits& limits)
      : service_(service),
        limits_(limits),
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
  void Started(std::shared_ptr<StreamCore> stream) override;
  void Ended(StreamCore* stream) override;
  void Request(RawService* service, int index);
  bool Idle() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return calls_ == 0; }

  Service* const service_;
  const Limits limits_;
  RawService worker_;
  RawService operator_;
  RawService health_;
  RawService reflection_;
  RawService reflection_alpha_;
  RawService replication_;
  RawService peer_;
  BuiltinServices builtin_;
  std::string address_;
  std::unique_ptr<::grpc::ServerCompletionQueue> queue_;
  std::unique_ptr<GrpcQueue> poller_queue_;
  std::unique_ptr<::grpc::Server> server_;
  std::unique_ptr<Poller> poller_;
  absl::Mutex mu_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  int calls_ ABSL_GUARDED_BY(mu_) = 0;
  std::unordered_map<StreamCore*, std::shared_ptr<StreamCore>> streams_ ABSL_GUARDED_BY(mu_);
};

// gRPC replaces the socket file of a live server without a word; a connection tells whether one listens.
bool UnixSocketAnswers(const std::string& path) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::memcpy(name.sun_path, path.data(), std::min(path.size(), sizeof(name.sun_path) - 1));
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  const bool answers = connect(fd, reinterpret_cast<const sockaddr*>(&name), sizeof(name)) == 0;
  close(fd);
  return answers;
}

// gRPC only logs why it could not bind: the same bind tells the reason.
std::string WhyNotBound(const Address& address) {
  if (address.scheme == Scheme::kUnix) {
    if (access(address.name.substr(0, address.name.rfind('/') + 1).c_str(), W_OK) != 0)
      return absl::StrCat("its folder: ", std::strerror(errno));
    return "the socket could not be created";
  }
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(address.host.c_str(), absl::StrCat(address.port).c_str(), &hints, &found);
  if (error != 0) return gai_strerror(error);
  std::string why = "the system gave no reason";
  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int one = 1;
  if (fd >= 0) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
  if (fd < 0 || bind(fd, found->ai_addr, found->ai_addrlen) != 0 || listen(fd, 1) != 0)
    why = errno == EADDRINUSE ? "address in use" : std::strerror(errno);
  if (fd >= 0) close(fd);
  freeaddrinfo(found);
  return why;
}

absl::Status CannotListen(const Address& address, std::string_view why) {
  return absl::UnavailableError(absl::StrCat("cannot listen on ", address.ToString(), ": ", std::string(why),
                                             "; choose another address or stop what holds it"));
}

absl::Status GrpcListener::Start(const Address& address) {
  if (address.scheme == Scheme::kUnix && UnixSocketAnswers(address.name))
    return CannotListen(address, "address in use");
  KeepGrpcInitialised();
  ::grpc::ServerBuilder builder;
  ForEachGrpcArgument(limits_, [&](const char* name, int value) { builder.AddChannelArgument(name, value); });
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);  // else two servers could share a port unnoticed
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxConcurrentStreams);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 100);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  int port = -1;
  const std::string target = address.scheme == Scheme::kUnix ? absl::StrCat("unix:", address.name)
                                                             : address.ToString().substr(sizeof("grpc://") - 1);
  builder.AddListeningPort(target, ::grpc::InsecureServerCredentials(), &port);
  const auto services = {&worker_, &operator_, &replication_, &peer_, &health_, &reflection_, &reflection_alpha_};
  for (RawService* service : services) builder.RegisterService(service);
  queue_ = builder.AddCompletionQueue();
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) return CannotListen(address, WhyNotBound(address));  // the destructor shuts the queue down
  Address bound = address;
  if (bound.scheme == Scheme::kGrpc) bound.port = static_cast<uint16_t>(port);
  address_ = bound.ToString();
  SetServing(true);
  for (RawService* service : services)
    for (int i = 0; i < service->method_count(); ++i) Request(service, i);
  poller_queue_ = std::make_unique<GrpcQueue>(queue_.get());
  poller_ = std::make_unique<Poller>(poller_queue_.get(), limits_.spin_us * kNsPerUs);
  return absl::OkStatus();
}

GrpcListener::~GrpcListener() {
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
  Request(service, index);
  return true;
}

void GrpcListener::Started(std::shared_ptr<StreamCore> stream) {
  bool stopping = false;
  {
    absl::MutexLock lock(&mu_);
    streams_.emplace(stream.get(), stream);
    stopping = stopping_;
  }
  if (stopping) stream->Abort(ShuttingDown());
}

void GrpcListener::Ended(StreamCore* stream) {
  absl::MutexLock lock(&mu_);
  if (stream != nullptr) streams_.erase(stream);
  --calls_;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Listener>> ListenGrpc(const Address& address, Service* service, const Limits& limits) {
  auto listener = std::make_unique<GrpcListener>(service, limits);
  absl::Status started = listener->Start(address);
  if (!started.ok()) return started;
  return listener;
}

}  // namespace gradwire::transport

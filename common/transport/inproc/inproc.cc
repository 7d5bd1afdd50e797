// Channel, listener and registry of the inproc transport; streams are in pipe.cc, calls in endpoint.cc.
#include "common/transport/inproc/inproc.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/transport/inproc/endpoint.h"

namespace gradwire::transport {
namespace {

class InprocChannel final : public Channel {
 public:
  InprocChannel(InprocRegistry& registry, std::string name, const Limits& limits)
      : registry_(registry), name_(std::move(name)), limits_(limits) {}

  ~InprocChannel() override {
    std::vector<std::weak_ptr<Pipe>> pipes;
    {
      absl::MutexLock lock(&mu_);
      pipes.swap(pipes_);
    }
    for (std::weak_ptr<Pipe>& weak : pipes)
      if (std::shared_ptr<Pipe> pipe = weak.lock()) pipe->Abandon();
  }

  absl::StatusOr<std::string> Call(Method method, std::string request, int64_t timeout_ms) override {
    GW_ASSIGN_OR_RETURN(std::shared_ptr<InprocEndpoint> endpoint, Endpoint());
    GW_ASSIGN_OR_RETURN(std::string reply, endpoint->Call(method, std::move(request), timeout_ms));
    if (reply.size() > limits_.max_message_bytes)
      return absl::ResourceExhaustedError(absl::StrCat(
          "the reply of ", reply.size(), " bytes is larger than the limit of ", limits_.max_message_bytes));
    return reply;
  }

  absl::StatusOr<std::unique_ptr<Stream>> Open(Method method, StreamSink* sink) override {
    GW_ASSIGN_OR_RETURN(std::shared_ptr<InprocEndpoint> endpoint, Endpoint());
    GW_ASSIGN_OR_RETURN(std::shared_ptr<Pipe> pipe, endpoint->Open(method, sink, limits_));
    {
      absl::MutexLock lock(&mu_);
      std::erase_if(pipes_, [](const std::weak_ptr<Pipe>& weak) { return weak.expired(); });
      pipes_.push_back(pipe);
    }
    return std::make_unique<PipeHandle>(std::move(pipe), Pipe::kClient);
  }

 private:
  absl::StatusOr<std::shared_ptr<InprocEndpoint>> Endpoint() {
    std::shared_ptr<InprocEndpoint> endpoint = registry_.Find(name_);
    if (endpoint == nullptr)
      return absl::UnavailableError(absl::StrCat("nobody listens on inproc://", name_, " in this process"));
    return endpoint;
  }

  InprocRegistry& registry_;
  const std::string name_;
  const Limits limits_;
  absl::Mutex mu_;
  std::vector<std::weak_ptr<Pipe>> pipes_ ABSL_GUARDED_BY(mu_);
};

class InprocListener final : public Listener {
 public:
  InprocListener(InprocRegistry& registry, std::string name, std::shared_ptr<InprocEndpoint> endpoint)
      : registry_(registry), name_(std::move(name)), endpoint_(std::move(endpoint)) {}
  ~InprocListener() override {
    registry_.Remove(name_);
    endpoint_->Shutdown();
  }
  std::string address() const override { return absl::StrCat("inproc://", name_); }
  void SetServing(bool) override {}

 private:
  InprocRegistry& registry_;
  const std::string name_;
  const std::shared_ptr<InprocEndpoint> endpoint_;
};

}  // namespace

absl::Status InprocRegistry::Add(const std::string& name, std::shared_ptr<InprocEndpoint> endpoint) {
  absl::MutexLock lock(&mu_);
  if (!endpoints_.emplace(name, std::move(endpoint)).second)
    return absl::UnavailableError(
        absl::StrCat("cannot listen on inproc://", name, ": address in use; choose another name"));
  return absl::OkStatus();
}

void InprocRegistry::Remove(const std::string& name) {
  absl::MutexLock lock(&mu_);
  endpoints_.erase(name);
}

std::shared_ptr<InprocEndpoint> InprocRegistry::Find(const std::string& name) {
  absl::MutexLock lock(&mu_);
  auto it = endpoints_.find(name);
  return it == endpoints_.end() || !it->second->InItsProcess() ? nullptr : it->second;
}

InprocRegistry& ProcessInprocRegistry() {
  static InprocRegistry* const registry = new InprocRegistry;  // never destroyed: listeners may outlive static objects
  return *registry;
}

absl::StatusOr<std::shared_ptr<Channel>> DialInproc(InprocRegistry& registry, const Address& address,
                                                    const Limits& limits) {
  return std::make_shared<InprocChannel>(registry, address.name, limits);
}

absl::StatusOr<std::unique_ptr<Listener>> ListenInproc(InprocRegistry& registry, const Address& address,
                                                       Service* service, const Limits& limits) {
  auto endpoint = std::make_shared<InprocEndpoint>(service, limits);
  GW_RETURN_IF_ERROR(registry.Add(address.name, endpoint));
  return std::make_unique<InprocListener>(registry, address.name, std::move(endpoint));
}

}  // namespace gradwire::transport

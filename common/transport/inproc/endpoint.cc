// See endpoint.h.
#include "common/transport/inproc/endpoint.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace gradwire::transport {
namespace {

absl::Status ShuttingDown() {
  return absl::UnavailableError("the server is shutting down; retry, its replacement may be starting");
}

// Shared by the caller, who may leave at its deadline, and the closure that runs the call.
struct PendingCall {
  absl::Mutex mu;
  bool done ABSL_GUARDED_BY(mu) = false;
  absl::StatusOr<std::string> reply ABSL_GUARDED_BY(mu) = absl::UnknownError("not called");
};

}  // namespace

InprocEndpoint::InprocEndpoint(Service* service, const Limits& limits)
    : service_(service), limits_(limits), executor_(std::make_unique<Executor>()) {}

absl::StatusOr<std::string> InprocEndpoint::Call(Method method, std::string request, int64_t timeout_ms) {
  if (request.size() > limits_.max_message_bytes)
    return absl::ResourceExhaustedError(absl::StrCat(
        "a request of ", request.size(), " bytes is larger than the receiver's limit of ", limits_.max_message_bytes));
  const absl::Time deadline = absl::Now() + absl::Milliseconds(timeout_ms);
  auto call = std::make_shared<PendingCall>();
  {
    absl::MutexLock lock(&mu_);
    if (stopping_) return ShuttingDown();
    ++calls_;
  }
  executor_->Run([this, call, method = std::string(method), request = std::move(request)] {
    absl::StatusOr<std::string> reply = service_->Call(method, request);
    {
      absl::MutexLock lock(&call->mu);
      call->reply = std::move(reply);
      call->done = true;
    }
    absl::MutexLock lock(&mu_);
    --calls_;
  });
  absl::MutexLock lock(&call->mu);
  if (!call->mu.AwaitWithDeadline(absl::Condition(&call->done), deadline))
    return absl::DeadlineExceededError(
        absl::StrCat(std::string(method), " was not answered within ", timeout_ms, " ms"));
  return std::move(call->reply);
}

absl::StatusOr<std::shared_ptr<Pipe>> InprocEndpoint::Open(Method method, StreamSink* sink,
                                                           const Limits& client_limits) {
  auto pipe = std::make_shared<Pipe>(client_limits, limits_, executor_.get(), [this](Pipe* p) { OnPipeClosed(p); });
  {
    absl::MutexLock lock(&mu_);
    if (stopping_) return ShuttingDown();
    pipes_.emplace(pipe.get(), pipe);
  }
  pipe->Open(service_, std::string(method), sink);
  return pipe;
}

void InprocEndpoint::OnPipeClosed(Pipe* pipe) {
  absl::MutexLock lock(&mu_);
  pipes_.erase(pipe);
}

void InprocEndpoint::Shutdown() {
  std::vector<std::shared_ptr<Pipe>> pipes;
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
    for (auto& [key, pipe] : pipes_) pipes.push_back(pipe);
  }
  for (auto& pipe : pipes) pipe->Abort(ShuttingDown());
  pipes.clear();
  {
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(this, &InprocEndpoint::Idle));
  }
  executor_.reset();
}

}  // namespace gradwire::transport

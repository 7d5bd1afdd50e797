// See executor.h.
#include "common/transport/inproc/executor.h"

#include <exception>
#include <utility>

namespace gradwire::transport {

Executor::Executor() {
  absl::MutexLock lock(&mu_);
  threads_.emplace_back([this] { Loop(); });
}

Executor::~Executor() {
  std::vector<std::thread> threads;
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
    threads.swap(threads_);
  }
  for (std::thread& thread : threads) thread.join();
}

bool Executor::Run(std::function<void()> closure) {
  absl::MutexLock lock(&mu_);
  if (stopping_) return false;
  queue_.push_back(std::move(closure));
  if (idle_ >= queue_.size() || threads_.size() >= kMaxThreads) return true;
  try {
    threads_.emplace_back([this] { Loop(); });
  } catch (const std::exception&) {
    // For want of threads or memory: it waits for one that runs.
  }
  return true;
}

void Executor::Loop() {
  while (true) {
    std::function<void()> closure;
    {
      absl::MutexLock lock(&mu_);
      ++idle_;
      mu_.Await(absl::Condition(this, &Executor::HasWork));
      --idle_;
      if (queue_.empty()) return;
      closure = std::move(queue_.front());
      queue_.pop_front();
    }
    closure();
  }
}

}  // namespace gradwire::transport

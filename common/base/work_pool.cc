// See work_pool.h.
#include "common/base/work_pool.h"

#include <utility>

#include "absl/status/statusor.h"
#include "common/base/start_thread.h"

namespace gradwire {

WorkPool::~WorkPool() {
  std::vector<std::thread> threads;
  {
    absl::MutexLock lock(&mu_);
    stopped_ = true;
    wake_.SignalAll();
    threads.swap(threads_);
  }
  for (std::thread& thread : threads) thread.join();
}

void WorkPool::Do(std::function<void()> work) {
  {
    absl::MutexLock lock(&mu_);
    if (idle_ <= queue_.size() && threads_.size() < limit_) {
      threads_.reserve(threads_.size() + 1);  // a thread that finds no room there would end the process
      absl::StatusOr<std::thread> thread = StartThread("a pool", [this] { Run(); });
      if (thread.ok()) threads_.push_back(*std::move(thread));
    }
    if (!threads_.empty()) {
      queue_.push_back(std::move(work));
      wake_.Signal();
      return;
    }
  }
  work();
}

void WorkPool::Run() {
  absl::MutexLock lock(&mu_);
  for (;;) {
    while (queue_.empty()) {
      if (stopped_) return;
      ++idle_;
      wake_.Wait(&mu_);
      --idle_;
    }
    const std::function<void()> work = std::move(queue_.front());
    queue_.pop_front();
    mu_.Unlock();
    work();
    mu_.Lock();
  }
}

}  // namespace gradwire

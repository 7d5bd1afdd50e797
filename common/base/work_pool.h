// A few threads for work that must not hold up whoever comes upon it.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace gradwire {

// Thread-safe. Threads, at most `threads`, are started as they are needed and end with the pool, which does what was
// given to it first. The queue is bounded by who gives: each has little that is not done yet.
class WorkPool {
 public:
  explicit WorkPool(size_t threads) : limit_(threads) {}
  ~WorkPool();
  WorkPool(const WorkPool&) = delete;
  WorkPool& operator=(const WorkPool&) = delete;

  // On one of the threads; here, before it returns, where not a single one can be had. `work` throws nothing.
  void Do(std::function<void()> work);

 private:
  void Run();

  const size_t limit_;
  absl::Mutex mu_;
  absl::CondVar wake_;
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
  size_t idle_ ABSL_GUARDED_BY(mu_) = 0;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mu_);
};

}  // namespace gradwire

// A few threads that run closures, for the inproc transport: deliveries to sinks and calls of services.
#pragma once

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace gradwire::transport {

// Thread-safe. Closures may block: a closure that finds no idle thread gets a new one, up to kMaxThreads; beyond that
// it waits. Queue bound: one closure per stream direction and per unary call.
class Executor {
 public:
  // Throws std::system_error where no thread can be started.
  Executor();
  // Runs what is queued, then joins. Must not be called on one of its own threads.
  ~Executor();

  // False after the destructor began.
  bool Run(std::function<void()> closure) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  static constexpr size_t kMaxThreads = 256;

  void Loop();
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !queue_.empty() || stopping_; }

  absl::Mutex mu_;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mu_);
  size_t idle_ ABSL_GUARDED_BY(mu_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace gradwire::transport

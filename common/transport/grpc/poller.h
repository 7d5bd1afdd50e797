// Threads that run the completions of one gRPC completion queue. Sinks and services are called right on them, without
// a hop to another thread; because those may block, a thread that leaves the queue makes sure another one is waiting.
#pragma once

#include <grpcpp/completion_queue.h>

#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace gradwire::transport {

// What a completion is delivered to. Owned by the object whose operation it ends.
class Completion {
 public:
  // `ok` as grpc::CompletionQueue::Next gives it.
  virtual void Run(bool ok) = 0;

 protected:
  ~Completion() = default;
};

// Calls a member function of T.
template <typename T>
class MemberCompletion final : public Completion {
 public:
  MemberCompletion(T* object, void (T::*function)(bool)) : object_(object), function_(function) {}
  void Run(bool ok) override { (object_->*function_)(ok); }

 private:
  T* const object_;
  void (T::*const function_)(bool);
};

// Thread-safe. The queue must outlive it. Bound: kMaxThreads threads; beyond it completions wait for a sink to return.
class Poller {
 public:
  explicit Poller(::grpc::CompletionQueue* queue);
  // Shuts the queue down, runs what is left in it and joins the threads. Nothing may start an operation on the queue
  // any more. Must not be called on one of its own threads.
  ~Poller();

 private:
  static constexpr int kMaxThreads = 256;
  static constexpr int kMaxWaiting = 2;  // more idle threads than this end

  void Loop();
  void Spawn() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Before and after waiting; Leave is false when this thread is one too many.
  bool BeginWait() ABSL_LOCKS_EXCLUDED(mu_);
  void EndWait() ABSL_LOCKS_EXCLUDED(mu_);

  ::grpc::CompletionQueue* const queue_;
  absl::Mutex mu_;
  int waiting_ ABSL_GUARDED_BY(mu_) = 0;
  int running_ ABSL_GUARDED_BY(mu_) = 0;
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread::id> ended_ ABSL_GUARDED_BY(mu_);  // of threads_, ready to be joined
};

}  // namespace gradwire::transport

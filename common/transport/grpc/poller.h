// Threads that run the completions of one gRPC completion queue. Sinks and services are called right on them, without
// a hop to another thread.
//
// One thread is the fastest: every further one that waits in the queue is woken in turn, which doubles the time of a
// round trip. But a sink may block, and may have much to do. So a keeper looks at the pool every few milliseconds while
// it is in use, and adds a thread when none was waiting at two looks in a row; it takes one away after a calm time.
#pragma once

#include <grpcpp/completion_queue.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

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

// The tag to start an operation with. What the starting thread did so far happens before the completion runs; gRPC's
// queue orders that, and ThreadSanitizer, which cannot see inside an uninstrumented gRPC, is told here.
inline void* Tag(Completion* completion) {
#ifdef __SANITIZE_THREAD__
  __tsan_release(completion);
#endif
  return completion;
}

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
  static constexpr int kLookMs = 2;
  static constexpr int kCalmLooks =
      100;  // so many looks with a thread to spare take it away, or send the keeper to rest

  void Loop();
  void Keep();
  // One look of the keeper. False when the queue has been unused for a calm time.
  bool Look() ABSL_LOCKS_EXCLUDED(mu_);
  void WakeKeeper() ABSL_LOCKS_EXCLUDED(mu_);
  void Spawn() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool KeeperWanted() const { return !resting_.load() || draining_.load(); }

  ::grpc::CompletionQueue* const queue_;
  std::atomic<int> waiting_ = 0;  // threads in the queue's Next
  std::atomic<int> surplus_ = 0;  // threads that should end
  std::atomic<uint64_t> events_ = 0;
  std::atomic<bool> resting_ = false;  // the keeper waits to be woken
  std::atomic<bool> draining_ = false;

  absl::Mutex mu_;
  int running_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread::id> ended_ ABSL_GUARDED_BY(mu_);  // of threads_, ready to be joined

  // The keeper's own.
  uint64_t seen_events_ = 0;
  int busy_looks_ = 0;
  int spare_looks_ = 0;
  int idle_looks_ = 0;
  std::thread keeper_;
};

}  // namespace gradwire::transport

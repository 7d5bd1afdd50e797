// Threads that run the completions of one queue: gRPC's, or that of an I/O context. Sinks and services are called right
// on them, without a hop to another thread.
//
// One thread is the fastest: two that wait in the queue are woken in turn, which doubles the time of a round trip and
// costs a third of the goodput. So one waits there at a time; a thread that comes back while nobody is there goes on at
// once, the others are the reserve. But a sink may block, and may have much to do. So a keeper looks at the pool every
// few milliseconds, less and less often while it finds a thread that waits (each look takes the processor from whoever
// computes), until nothing has come since its last look; then it sleeps until the next completion, as a process has a
// pool for every server that it talks to. It sends one of the reserve in when nobody waits in the queue; with a single
// busy stream only when nobody has since the last look: two threads that take turns at its messages are slower than
// one. It adds a thread when all of them stay inside their sinks, or when they use up their CPU time, sinks take a good
// part of it and there are more busy streams than threads, or all of their time goes into sinks; it takes one away when
// the others have time to spare.
//
// A thread outside the pool that is about to wait for a message can run the completions itself (RunReady), which saves
// waking one thread for the message and another for what the message says. Two threads in the queue would be in each
// other's way: the pool's rest meanwhile, and the keeper calls them back when nobody has polled for two looks.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/base/clock.h"
#include "common/base/spin_budget.h"
#include "common/transport/sink_scope.h"

namespace gradwire::transport {

// What a completion is delivered to. Owned by the object whose operation it ends.
class Completion {
 public:
  // `ok`: whether the operation succeeded, as its queue means it.
  virtual void Run(bool ok) = 0;

 protected:
  ~Completion() = default;
};

// Where the threads of a Poller get completions from. Thread-safe.
class CompletionQueue {
 public:
  enum class Got { kCompletion, kNothing, kEnd };
  struct Event {
    Completion* completion = nullptr;
    bool ok = false;
  };
  virtual ~CompletionQueue() = default;
  // Waits for the next completion. kEnd once the queue was shut down and is empty.
  virtual Got Next(Event* event) = 0;
  // The same without waiting; kNothing when there is none, or another thread in Next will get it.
  virtual Got TryNext(Event* event) = 0;
  // No operation is started any more; those under way still complete.
  virtual void Shutdown() = 0;
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
  // `spin_ns`: how long the pool's thread busy-waits for the next completion, while they come that fast; 0: never.
  // Throws std::system_error where no thread can be started. Later ones that cannot are done without.
  Poller(CompletionQueue* queue, TimeNs spin_ns);
  // Shuts the queue down, runs what is left in it and joins the threads. Nothing may start an operation on the queue
  // any more. Must not be called on one of its own threads.
  ~Poller();

  // Runs a completion, if there is one, on the calling thread. Not inside a sink.
  void RunReady() ABSL_LOCKS_EXCLUDED(mu_);
  // The caller of RunReady is about to block: the pool's threads run completions from here on.
  void HandBack() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  static constexpr int kMaxThreads = 256;
  static constexpr int kLookMs = 2;          // until the next look, where nobody waits in the queue
  static constexpr int kLongestLookMs = 16;  // where at each look somebody did, twice as long each time
  static constexpr int kStuckLooks = 4;      // so many looks without an event while no thread waits
  static constexpr int kLoadLooks = 5;       // over so many looks the load is measured
  static constexpr int kSpareLooks = 100;    // so many with a thread to spare take it away
  // A thread is full with this part of its time on a CPU. With less than kInSinks of it inside sinks, another thread
  // would only be in its way.
  static constexpr double kFull = 0.9;
  static constexpr double kInSinks = 0.3;
  // So must it where the messages come on fewer streams than there would be threads: one stream's sink is called by one
  // thread at a time. This much of a stream counts as another one.
  static constexpr double kOther = 0.2;

  void Loop();
  // Returns when it is this thread's turn to wait in the queue. False: it is over.
  bool Enter() ABSL_LOCKS_EXCLUDED(mu_);
  // This thread has got a completion, or the queue's end.
  void Leave(bool got) ABSL_LOCKS_EXCLUDED(mu_);
  // Busy-waits as `spin` says; null: not at all. False when there will be no more.
  bool Next(SpinBudget* spin, CompletionQueue::Event* event);
  void Run(const CompletionQueue::Event& event);
  // Returns when no caller of RunReady is expected any more.
  void Rest() ABSL_LOCKS_EXCLUDED(mu_);
  bool MayRun() const { return !callers_.load() || draining_.load(); }
  void Keep();
  // One look of the keeper. False: it may rest until the next completion.
  bool Look() ABSL_LOCKS_EXCLUDED(mu_);
  void WakeKeeper() ABSL_LOCKS_EXCLUDED(mu_);
  // From here on, whatever was before; what was spent in sinks until now.
  SinkLoad::Spent BeginMeasuring() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Measures the load since the last measurement.
  void Measure() ABSL_LOCKS_EXCLUDED(mu_);
  void Spawn() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // CPU time of all threads so far.
  int64_t CpuNs() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool KeeperWanted() const { return !resting_.load() || draining_.load(); }

  CompletionQueue* const queue_;
  const TimeNs spin_ns_;
  std::atomic<int> waiting_ = 0;  // threads in the queue's Next, and the reserve
  std::atomic<int> surplus_ = 0;  // threads that should end
  std::atomic<uint64_t> events_ = 0;
  std::atomic<uint64_t> polls_ = 0;    // calls of RunReady
  std::atomic<bool> callers_ = false;  // they run the completions, not the pool
  SinkLoad load_;
  std::atomic<bool> resting_ = false;  // the keeper waits to be woken
  std::atomic<bool> draining_ = false;

  absl::Mutex mu_;
  absl::CondVar turn_;
  bool inside_ ABSL_GUARDED_BY(mu_) = false;  // one waits in the queue
  bool over_ ABSL_GUARDED_BY(mu_) = false;    // there is nothing more to come
  int reserve_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t entries_ ABSL_GUARDED_BY(mu_) = 0;  // how often one began to wait there
  int running_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread::id> ended_ ABSL_GUARDED_BY(mu_);  // of threads_, ready to be joined

  // The keeper's own.
  int look_ms_ = kLookMs;
  uint64_t seen_events_ = 0;
  uint64_t seen_polls_ = 0;
  uint64_t seen_entries_ = 0;
  bool parallel_ = false;  // messages come on several busy streams
  int stuck_looks_ = 0;
  int looks_ = 0;  // since the last measurement
  int spare_looks_ = 0;
  struct Load {
    int threads = 0;
    int64_t at_ns = 0;
    int64_t cpu_ns = 0;
  } measured_;
  std::thread keeper_;
};

}  // namespace gradwire::transport

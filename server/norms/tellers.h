// The threads on which shards tell each other their norms: a bounded number for all jobs of a server, however many
// shards those have. A shard that is down, or a peer that only says it is one, holds a thread for as long as a call may
// take; so shards that have answered have threads of their own, and every job gets its turn.
#pragma once

#include <cstddef>
#include <optional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace gradwire {

// Who has something to tell. Called by many threads; outlives its time in Tellers.
class Telling {
 public:
  struct Next {
    std::optional<size_t> to;                 // who is to be told now; he is not given out again before Tell returned
    bool proven = false;                      // the last call to him was answered
    absl::Time due = absl::InfiniteFuture();  // nobody now: when there will be
  };
  virtual ~Telling() = default;
  // `unproven`: also those who have not answered, or not lately.
  virtual Next TakeNext(bool unproven, absl::Time now) = 0;
  // Blocks for as long as a call may take. Throws nothing.
  virtual void Tell(size_t to) = 0;
};

// Thread-safe. Threads are started as they are needed, and end with it; nobody may be in it then.
class Tellers {
 public:
  static constexpr size_t kThreads = 32;
  static constexpr size_t kUnproven = 16;      // of them, for those who have not answered
  static constexpr size_t kUnprovenOfOne = 4;  // the same, of one job

  Tellers() = default;
  ~Tellers();
  Tellers(const Tellers&) = delete;
  Tellers& operator=(const Tellers&) = delete;

  // ResourceExhausted: not a single thread can be had.
  absl::Status Add(Telling* telling);
  // Returns when none of its calls is running.
  void Remove(Telling* telling);
  // Somebody who was added has something to tell.
  void Wake();

  size_t threads() const;

 private:
  struct Entry {
    Telling* telling = nullptr;
    size_t unproven = 0;  // calls that are running
    size_t running = 0;
    bool leaving = false;
  };
  struct Work {
    Telling* telling = nullptr;
    size_t to = 0;
    bool proven = false;
  };

  void Run();
  void LookForWork() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);  // by another thread
  absl::Status StartOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::optional<Work> TakeWork(absl::Time* due) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Entry* Find(const Telling* telling) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  mutable absl::Mutex mu_;  // taken before the locks of a Telling
  absl::CondVar work_;      // there may be some
  absl::CondVar left_;      // a call of somebody who is to be removed has returned
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<Entry> entries_ ABSL_GUARDED_BY(mu_);
  size_t turn_ ABSL_GUARDED_BY(mu_) = 0;      // whose turn is next
  size_t idle_ ABSL_GUARDED_BY(mu_) = 0;      // threads that wait
  size_t unproven_ ABSL_GUARDED_BY(mu_) = 0;  // calls that are running
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mu_);
};

}  // namespace gradwire

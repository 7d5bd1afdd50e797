// Marks a thread as being inside a call of a sink. Send never blocks there (transport.h), and destroying a stream
// inside its own sink does not wait for that sink. Also measures the time that threads spend there.
#pragma once

#include <algorithm>
#include <cstdint>
#include <new>
#include <unordered_map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/base/clock.h"

namespace gradwire::transport {

class StreamSink;

// The time that a pool's threads spend inside sinks. Thread-safe.
class SinkLoad {
 public:
  struct Spent {
    int64_t all_ns = 0;
    int64_t busiest_ns = 0;  // of the stream whose sink took most
  };
  // Without memory it is lost: that costs a measurement.
  void Add(const void* stream, int64_t ns) noexcept {
    absl::MutexLock lock(&mu_);
    try {
      spent_ns_[stream] += ns;
    } catch (const std::bad_alloc&) {
    }
  }
  // Since the last call.
  Spent Take() {
    std::unordered_map<const void*, int64_t> spent_ns;
    {
      absl::MutexLock lock(&mu_);
      spent_ns.swap(spent_ns_);
    }
    Spent spent;
    for (const auto& [stream, ns] : spent_ns) {
      spent.all_ns += ns;
      spent.busiest_ns = std::max(spent.busiest_ns, ns);
    }
    return spent;
  }

 private:
  absl::Mutex mu_;
  // Not one of Abseil's: where there is no memory it stays as it was.
  std::unordered_map<const void*, int64_t> spent_ns_ ABSL_GUARDED_BY(mu_);
};

class SinkScope {
 public:
  explicit SinkScope(const void* stream)
      : stream_(stream), outer_(current_), begin_ns_(Counts() ? SteadyClock().Now() : 0) {
    current_ = this;
  }
  ~SinkScope() {
    current_ = outer_;
    if (Counts()) load_->Add(stream_, SteadyClock().Now() - begin_ns_);
  }
  SinkScope(const SinkScope&) = delete;
  SinkScope& operator=(const SinkScope&) = delete;

  // This thread is inside some sink.
  static bool Any() { return current_ != nullptr; }
  // This thread is inside the sink of `stream`.
  static bool Of(const void* stream) {
    for (const SinkScope* s = current_; s != nullptr; s = s->outer_)
      if (s->stream_ == stream) return true;
    return false;
  }
  // From now on adds what this thread spends inside sinks to `load`, which must outlive it.
  static void CountInto(SinkLoad* load) { load_ = load; }

 private:
  bool Counts() const { return outer_ == nullptr && load_ != nullptr; }

  const void* const stream_;
  SinkScope* const outer_;
  const int64_t begin_ns_;
  static inline thread_local SinkScope* current_ = nullptr;
  static inline thread_local SinkLoad* load_ = nullptr;
};

// How the handle of a stream that was cancelled goes: returns once the stream is `closed`, and its sink not called any
// more. Inside that sink it does not wait: the sink is dropped instead. `mu` is the lock of both.
inline void LeaveSink(const void* stream, StreamSink** sink, const bool* closed, absl::Mutex* mu)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
  if (SinkScope::Of(stream)) {
    *sink = nullptr;
  } else {
    mu->Await(absl::Condition(closed));
  }
}

}  // namespace gradwire::transport

// Marks a thread as being inside a call of a sink. Send never blocks there (transport.h), and destroying a stream
// inside its own sink does not wait for that sink. Also measures the time that threads spend there.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include "common/base/clock.h"

namespace gradwire::transport {

class SinkScope {
 public:
  explicit SinkScope(const void* stream)
      : stream_(stream), outer_(current_), begin_ns_(outer_ == nullptr ? SteadyClock().Now() : 0) {
    current_ = this;
  }
  ~SinkScope() {
    current_ = outer_;
    if (outer_ == nullptr && total_ns_ != nullptr) *total_ns_ += SteadyClock().Now() - begin_ns_;
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
  // From now on adds what this thread spends inside sinks to `total_ns`, which must outlive it.
  static void CountInto(std::atomic<int64_t>* total_ns) { total_ns_ = total_ns; }

 private:
  const void* const stream_;
  SinkScope* const outer_;
  const int64_t begin_ns_;
  static inline thread_local SinkScope* current_ = nullptr;
  static inline thread_local std::atomic<int64_t>* total_ns_ = nullptr;
};

}  // namespace gradwire::transport

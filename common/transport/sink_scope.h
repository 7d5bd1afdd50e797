// Marks a thread as being inside a call of a sink. Send never blocks there (transport.h), and destroying a stream
// inside its own sink does not wait for that sink.
#pragma once

namespace gradwire::transport {

class SinkScope {
 public:
  explicit SinkScope(const void* stream) : stream_(stream), outer_(current_) { current_ = this; }
  ~SinkScope() { current_ = outer_; }
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

 private:
  const void* const stream_;
  SinkScope* const outer_;
  static inline thread_local SinkScope* current_ = nullptr;
};

}  // namespace gradwire::transport

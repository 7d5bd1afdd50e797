// An I/O context as the threads of a Poller see it: operations hand their completions to whichever thread waits, and
// are run by it outside of the context. Boost appears only in this folder.
#pragma once

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/system/error_code.hpp>
#include <utility>

#include "common/transport/poller.h"

namespace gradwire::transport::tcp {

namespace asio = boost::asio;
using boost::system::error_code;

// An operation of `T`, at most once under way at a time, and how it ended. `T` must live until it was run.
template <typename T>
class Operation final : public Completion {
 public:
  Operation(T* object, void (T::*function)(error_code error, size_t bytes)) : object_(object), function_(function) {}
  void Run(bool) override { (object_->*function_)(error_, bytes_); }
  void Ended(error_code error, size_t bytes) {
    error_ = error;
    bytes_ = bytes;
  }

 private:
  T* const object_;
  void (T::*const function_)(error_code, size_t);
  error_code error_;
  size_t bytes_ = 0;
};

// Thread-safe.
class IoQueue final : public CompletionQueue {
 public:
  asio::io_context& context() { return context_; }

  // The handler to start an operation with.
  template <typename T>
  static auto Handler(Operation<T>* operation) {
    return [operation](error_code error, size_t bytes = 0) {
      operation->Ended(error, bytes);
      arrived_ = operation;
    };
  }

  // Runs the operation soon, without waiting for anything.
  template <typename T>
  void Post(Operation<T>* operation) {
    asio::post(context_, [operation] {
      operation->Ended({}, 0);
      arrived_ = operation;
    });
  }

  Got Next(Event* event) override {
    while (context_.run_one() != 0)
      if (Take(event)) return Got::kCompletion;
    return Got::kEnd;
  }
  Got TryNext(Event* event) override {
    while (context_.poll_one() != 0)
      if (Take(event)) return Got::kCompletion;
    return Got::kNothing;
  }
  void Shutdown() override { work_.reset(); }

 private:
  static bool Take(Event* event) {
    event->completion = std::exchange(arrived_, nullptr);
    event->ok = true;
    return event->completion != nullptr;
  }

  // What the handler that this thread ran has brought.
  static inline thread_local Completion* arrived_ = nullptr;
  asio::io_context context_;
  asio::executor_work_guard<asio::io_context::executor_type> work_{context_.get_executor()};
};

}  // namespace gradwire::transport::tcp

// What transport tests share: a sink that records, and a service scripted by method name.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/transport/transport.h"

namespace gradwire::transport::testing {

constexpr std::string_view kUnary = "gradwire.v1.Worker/Join";
constexpr std::string_view kStream = "gradwire.v1.Worker/Push";
constexpr std::string_view kOtherStream = "gradwire.v1.Worker/Pull";

// Far above what anything here takes; reached only by a hang.
inline absl::Duration HangBound() { return absl::Seconds(60); }

// How often a listener warned, once it did: a peer may hear of its end before the operator does.
inline int Warnings(const std::atomic<int>& warned) {
  for (const absl::Time bound = absl::Now() + HangBound(); warned == 0 && absl::Now() < bound;)
    absl::SleepFor(absl::Milliseconds(10));
  return warned;
}

inline std::string FrameOf(const Message& message) {
  std::string out;
  for (const Bytes& bytes : message.frame) out.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  return out;
}

inline Message TextMessage(std::string control, std::string frame = "") {
  Message message;
  // Field 1, a string: control bytes must be a legal protobuf.
  message.control = "\x0A";
  for (size_t n = control.size();;) {
    message.control.push_back(static_cast<char>(n >= 0x80 ? (n & 0x7F) | 0x80 : n));
    if (n < 0x80) break;
    n >>= 7;
  }
  message.control += control;
  if (!frame.empty()) message.frame.push_back(Bytes::FromString(std::move(frame)));
  return message;
}

// Keeps what it is given, or passes it to `on_message`.
class RecordingSink : public StreamSink {
 public:
  explicit RecordingSink(std::function<void(Message)> on_message = nullptr,
                         std::function<void(absl::Status)> on_closed = nullptr)
      : on_message_(std::move(on_message)), on_closed_(std::move(on_closed)) {}

  void OnMessage(Message message) override {
    {
      absl::MutexLock lock(&mu_);
      overlapped_ |= inside_ || closed_;
      inside_ = true;
      ++count_;
      if (!on_message_) messages_.push_back(message);
    }
    if (on_message_) on_message_(std::move(message));
    absl::MutexLock lock(&mu_);
    inside_ = false;
  }
  void OnClosed(absl::Status status) override {
    if (on_closed_) on_closed_(status);
    absl::MutexLock lock(&mu_);
    overlapped_ |= inside_ || closed_;
    closed_ = true;
    status_ = std::move(status);
  }

  // Waits for the end; DataLoss when it does not come.
  absl::Status Wait() {
    absl::MutexLock lock(&mu_);
    if (!mu_.AwaitWithTimeout(absl::Condition(&closed_), HangBound())) return absl::DataLossError("hang: no OnClosed");
    return status_;
  }
  bool WaitForCount(size_t n) {
    absl::MutexLock lock(&mu_);
    const auto enough = [this, n] { return count_ >= n; };
    return mu_.AwaitWithTimeout(absl::Condition(&enough), HangBound());
  }
  bool closed() {
    absl::MutexLock lock(&mu_);
    return closed_;
  }
  size_t count() {
    absl::MutexLock lock(&mu_);
    return count_;
  }
  std::vector<Message> messages() {
    absl::MutexLock lock(&mu_);
    return messages_;
  }
  // Two calls overlapped, or one came after OnClosed.
  bool overlapped() {
    absl::MutexLock lock(&mu_);
    return overlapped_;
  }

 private:
  const std::function<void(Message)> on_message_;
  const std::function<void(absl::Status)> on_closed_;
  absl::Mutex mu_;
  std::vector<Message> messages_;
  absl::Status status_;
  size_t count_ = 0;
  bool inside_ = false;
  bool closed_ = false;
  bool overlapped_ = false;
};

// Answers calls by `on_call`; accepts streams by `on_accept`, by default echoing every message.
class TestService : public Service {
 public:
  using Accepter = std::function<absl::StatusOr<std::unique_ptr<StreamSink>>(Method, std::shared_ptr<Stream>)>;

  absl::StatusOr<std::string> Call(Method method, std::string_view request) override {
    if (on_call) return on_call(method, request);
    return std::string(request);
  }
  absl::StatusOr<std::unique_ptr<StreamSink>> Accept(Method method, std::shared_ptr<Stream> stream) override {
    if (on_accept) return on_accept(method, std::move(stream));
    return std::make_unique<RecordingSink>([stream](Message message) { (void)stream->Send(std::move(message)); });
  }

  std::function<absl::StatusOr<std::string>(Method, std::string_view)> on_call;
  Accepter on_accept;
};

// A gate a sink can be stopped at.
class Gate {
 public:
  void Open() {
    absl::MutexLock lock(&mu_);
    open_ = true;
  }
  bool Pass() {
    absl::MutexLock lock(&mu_);
    return mu_.AwaitWithTimeout(absl::Condition(&open_), HangBound());
  }

 private:
  absl::Mutex mu_;
  bool open_ = false;
};

}  // namespace gradwire::transport::testing

// A listener and a channel of each transport in turn, for tests that every one of them must pass.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/transport/transport.h"
#include "tests/conformance/transport/testing.h"

namespace gradwire::transport::testing {

inline auto EveryTransport() { return ::testing::Values("inproc", "grpc", "unix", "tcp"); }

inline constexpr size_t kMiB = 1 << 20;
// What may be under way below a transport's own window: gRPC's write buffer and HTTP/2 windows, and the kernel's socket
// buffers, which grow to tens of MiB by themselves.
inline constexpr size_t kBelowUs = 48u << 20;

class TransportTest : public ::testing::TestWithParam<std::string> {
 protected:
  std::string ListenAddress() {
    static std::atomic<int> counter = 0;
    const std::string unique = absl::StrCat(getpid(), "-", counter++);
    if (GetParam() == "unix") return absl::StrCat("unix://", ::testing::TempDir(), "/gw-", unique, ".sock");
    if (GetParam() == "inproc") return absl::StrCat("inproc://test-", unique);
    return absl::StrCat(GetParam(), "://127.0.0.1:0");
  }
  void StartListener(const std::string& address) {
    auto listener = Listen(address, &service_, limits_);
    ASSERT_TRUE(listener.ok()) << listener.status();
    listener_ = *std::move(listener);
  }
  // Stops channel and listener before what was declared earlier in the test, and the service refers to, is gone.
  class [[nodiscard]] Running {
   public:
    explicit Running(TransportTest* test) : test_(test) {}
    ~Running() {
      test_->channel_.reset();
      test_->listener_.reset();
    }

   private:
    TransportTest* const test_;
  };
  Running Start() {
    StartListener(ListenAddress());
    auto channel = Dial(listener_->address(), limits_);
    EXPECT_TRUE(channel.ok()) << channel.status();
    if (channel.ok()) channel_ = *std::move(channel);
    return Running(this);
  }
  // Opens a stream that must open.
  std::unique_ptr<Stream> OpenStream(StreamSink* sink, Method method = kStream) {
    auto stream = channel_->Open(method, sink);
    EXPECT_TRUE(stream.ok()) << stream.status();
    return stream.ok() ? *std::move(stream) : nullptr;
  }
  // The status of a stream, whether Open or OnClosed tells it.
  absl::Status StreamStatus(Method method) {
    RecordingSink sink;
    auto stream = channel_->Open(method, &sink);
    return stream.ok() ? sink.Wait() : stream.status();
  }

  // Order matters: the channel goes first, then the listener, then what it calls.
  Limits limits_;
  TestService service_;
  std::unique_ptr<Listener> listener_;
  std::shared_ptr<Channel> channel_;
};

}  // namespace gradwire::transport::testing

// What a stream holds for a peer that does not take it is bounded, on every transport: senders wait, or hear of room.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/transport/transport.h"
#include "tests/conformance/transport/testing.h"
#include "tests/conformance/transport/transport_fixture.h"

namespace gradwire::transport {
namespace {

using namespace testing;  // NOLINT: tests/conformance/transport/testing.h

class WindowTest : public TransportTest {};

TEST_P(WindowTest, WhatIsSentAtOnceArrivesAtOnce) {
  limits_.keepalive_ms = 2 * absl::ToInt64Milliseconds(HangBound());  // no sign of life moves it on
  service_.on_accept = [](Method, std::shared_ptr<Stream> stream) -> absl::StatusOr<std::unique_ptr<StreamSink>> {
    for (int i = 0; i < 3; ++i) (void)stream->Send(TextMessage("x"));
    return std::make_unique<RecordingSink>();
  };
  const Running running = Start();
  RecordingSink sink;
  auto stream = OpenStream(&sink);
  EXPECT_TRUE(sink.WaitForCount(3));
  stream.reset();
}

TEST_P(WindowTest, BlockedSinkStopsTheSender) {
  limits_.send_window_bytes = kMiB;
  constexpr size_t kMessages = 256;
  constexpr size_t kBytes = 256 << 10;
  // The window, one message, and what the kernel and HTTP/2 may hold.
  constexpr size_t kBound = kMiB + kBelowUs;
  Gate gate;
  std::atomic<size_t> delivered = 0;
  service_.on_accept = [&](Method, std::shared_ptr<Stream>) -> absl::StatusOr<std::unique_ptr<StreamSink>> {
    return std::make_unique<RecordingSink>([&](Message) {
      gate.Pass();
      ++delivered;
    });
  };
  const Running running = Start();
  RecordingSink sink;
  auto stream = OpenStream(&sink);
  absl::Mutex mu;
  size_t sent = 0;
  std::thread sender([&] {
    for (size_t i = 0; i < kMessages; ++i) {
      if (!stream->Send(TextMessage("x", std::string(kBytes, 'b'))).ok()) break;
      absl::MutexLock lock(&mu);
      ++sent;
    }
  });
  {
    // Until no message was taken for half a second.
    absl::MutexLock lock(&mu);
    for (size_t seen = SIZE_MAX; seen != sent;) {
      seen = sent;
      const auto more = [&] { return sent != seen; };
      mu.AwaitWithTimeout(absl::Condition(&more), absl::Milliseconds(500));
    }
    EXPECT_LE(sent * kBytes, kBound);
    EXPECT_LT(sent, kMessages);
  }
  gate.Open();
  sender.join();
  stream->Finish();
  EXPECT_TRUE(sink.Wait().ok());
  EXPECT_EQ(delivered, kMessages);
}

// Notes when there is room.
class RoomSink final : public RecordingSink {
 public:
  void OnRoom() override {
    if (closed()) after_end_ = true;
    ++told_;
  }
  int told() const { return told_; }
  bool after_end() const { return after_end_; }

 private:
  std::atomic<int> told_ = 0;
  std::atomic<bool> after_end_ = false;
};

TEST_P(WindowTest, TrySendNeverBlocksAndTheSinkHearsOfRoom) {
  limits_.send_window_bytes = kMiB;
  constexpr size_t kBytes = 256 << 10;
  Gate gate;
  absl::Mutex mu;
  std::vector<std::string> delivered;  // the first two letters of each frame; under `mu`
  service_.on_accept = [&](Method, std::shared_ptr<Stream>) -> absl::StatusOr<std::unique_ptr<StreamSink>> {
    return std::make_unique<RecordingSink>([&](Message message) {
      gate.Pass();
      const absl::MutexLock lock(&mu);
      delivered.push_back(FrameOf(message).substr(0, 2));
    });
  };
  const Running running = Start();
  RoomSink sink;
  auto stream = OpenStream(&sink);
  size_t sent = 0;
  const auto next = [&] {
    return TextMessage("x", absl::StrCat(absl::Dec(sent % 100, absl::kZeroPad2), std::string(kBytes, 'b')));
  };
  Message message = next();
  // What the kernel holds grows with every look; that nothing is taken any more is seen by the peer's standing still.
  for (absl::StatusOr<bool> taken = true; sent * kBytes <= kMiB + kBelowUs; message = next()) {
    taken = stream->TrySend(message);
    ASSERT_TRUE(taken.ok()) << taken.status();
    if (!*taken) break;
    ++sent;
  }
  EXPECT_LE(sent * kBytes, kMiB + kBelowUs);
  EXPECT_EQ(FrameOf(message).size(), kBytes + 2) << "it is as it was";
  gate.Open();
  const size_t end = sent + 64;
  while (sent < end) {
    const int told = sink.told();
    const absl::StatusOr<bool> taken = stream->TrySend(message);
    ASSERT_TRUE(taken.ok()) << taken.status();
    if (*taken) {
      ++sent;
      message = next();
    } else {
      const absl::Time hangs = absl::Now() + HangBound();
      while (sink.told() == told && absl::Now() < hangs) std::this_thread::yield();
      ASSERT_NE(sink.told(), told);
    }
  }
  stream->Finish();
  EXPECT_TRUE(sink.Wait().ok());
  EXPECT_GT(sink.told(), 0);
  EXPECT_FALSE(sink.overlapped());
  EXPECT_FALSE(sink.after_end());
  const absl::MutexLock lock(&mu);
  ASSERT_EQ(delivered.size(), end);
  for (size_t i = 0; i < end; ++i) EXPECT_EQ(delivered[i], absl::StrCat(absl::Dec(i % 100, absl::kZeroPad2)));
}

TEST_P(WindowTest, AStreamThatEndsTellsOfNoRoom) {
  limits_.send_window_bytes = kMiB;
  Gate gate;
  service_.on_accept = [&](Method, std::shared_ptr<Stream>) -> absl::StatusOr<std::unique_ptr<StreamSink>> {
    return std::make_unique<RecordingSink>([&](Message) { gate.Pass(); });
  };
  const Running running = Start();
  RoomSink sink;
  auto stream = OpenStream(&sink);
  Message message = TextMessage("x", std::string(kMiB, 'b'));
  for (absl::StatusOr<bool> taken = true; taken.ok() && *taken;) {
    Message copy = message;
    taken = stream->TrySend(copy);
    ASSERT_TRUE(taken.ok());
  }
  stream->Cancel();
  EXPECT_EQ(sink.Wait().code(), absl::StatusCode::kCancelled);
  EXPECT_FALSE(stream->TrySend(message).ok());
  EXPECT_FALSE(sink.after_end());
  gate.Open();
}

TEST_P(WindowTest, EchoPeerThatDoesNotReadIsHeld) {
  // The server's sink never blocks in Send; its reads must wait instead, or its queue would grow without bound.
  limits_.send_window_bytes = kMiB;
  constexpr size_t kMessages = 512;
  constexpr size_t kBytes = 256 << 10;
  std::atomic<size_t> echoed = 0;
  service_.on_accept = [&](Method, std::shared_ptr<Stream> stream) -> absl::StatusOr<std::unique_ptr<StreamSink>> {
    return std::make_unique<RecordingSink>([&echoed, stream](Message m) {
      ++echoed;
      (void)stream->Send(std::move(m));
    });
  };
  const Running running = Start();
  Gate gate;
  RecordingSink sink([&](Message) { gate.Pass(); });
  auto stream = OpenStream(&sink);
  std::atomic<size_t> sent = 0;
  std::thread sender([&] {
    for (size_t i = 0; i < kMessages && stream->Send(TextMessage("x", std::string(kBytes, 'b'))).ok(); ++i) ++sent;
  });
  absl::Mutex mu;
  absl::MutexLock lock(&mu);
  for (size_t seen = SIZE_MAX; seen != sent;) {
    seen = sent;
    const auto never = [] { return false; };
    mu.AwaitWithTimeout(absl::Condition(&never), absl::Milliseconds(500));
  }
  EXPECT_LT(sent, kMessages);
  EXPECT_LT(echoed * kBytes, kMiB + kBelowUs);
  gate.Open();
  sender.join();
  EXPECT_TRUE(sink.WaitForCount(kMessages));
}

TEST_P(WindowTest, CancelReleasesABlockedSender) {
  limits_.send_window_bytes = kMiB;
  Gate gate;
  service_.on_accept = [&](Method, std::shared_ptr<Stream>) -> absl::StatusOr<std::unique_ptr<StreamSink>> {
    return std::make_unique<RecordingSink>([&](Message) { gate.Pass(); });
  };
  const Running running = Start();
  RecordingSink sink;
  auto stream = OpenStream(&sink);
  std::atomic<size_t> sent = 0;
  std::thread sender([&] {
    while (stream->Send(TextMessage("x", std::string(kMiB, 'b'))).ok()) ++sent;
  });
  while (sent < 2) std::this_thread::yield();
  stream->Cancel();
  sender.join();
  EXPECT_EQ(sink.Wait().code(), absl::StatusCode::kCancelled);
  gate.Open();
}

INSTANTIATE_TEST_SUITE_P(All, WindowTest, EveryTransport(), [](const auto& info) { return info.param; });

}  // namespace
}  // namespace gradwire::transport

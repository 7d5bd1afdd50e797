// Callers that receive by themselves (Channel::Poll), over every transport.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/transport/transport.h"
#include "tests/conformance/transport/testing.h"

namespace gradwire::transport {
namespace {

using namespace testing;  // NOLINT: tests/conformance/transport/testing.h

class PollingTest : public ::testing::TestWithParam<std::string> {
 protected:
  PollingTest() {
    static std::atomic<int> counter = 0;
    listener_ = *Listen(GetParam() == "inproc" ? absl::StrCat("inproc://poll-", getpid(), "-", counter++)
                                               : absl::StrCat(GetParam(), "://127.0.0.1:0"),
                        &service_);
    channel_ = *Dial(listener_->address());
  }
  // The stream was opened on the other end: from here on an echo comes soon.
  std::unique_ptr<Stream> OpenStream(RecordingSink* sink) {
    auto stream = *channel_->Open(kStream, sink);
    EXPECT_TRUE(stream->Send(TextMessage("opened")).ok());
    EXPECT_TRUE(sink->WaitForCount(1));
    return stream;
  }
  // False where the transport receives on its own threads alone.
  bool PollUntil(RecordingSink& sink, size_t count) {
    const absl::Time bound = absl::Now() + HangBound();
    while (sink.count() < count) {
      if (!channel_->Poll()) return false;
      EXPECT_LT(absl::Now(), bound) << "hang";
      if (absl::Now() > bound) break;
    }
    return true;
  }

  TestService service_;
  std::unique_ptr<Listener> listener_;
  std::shared_ptr<Channel> channel_;
};

TEST_P(PollingTest, TheCallerReceives) {
  std::atomic<bool> on_caller = false;
  const std::thread::id caller = std::this_thread::get_id();
  RecordingSink sink([&](Message) { on_caller = std::this_thread::get_id() == caller; });
  auto stream = OpenStream(&sink);
  const absl::Time bound = absl::Now() + HangBound();
  // The channel's own thread may receive the first messages: it was waiting for them.
  for (size_t count = 2; !on_caller; ++count) {
    ASSERT_TRUE(stream->Send(TextMessage("x")).ok());
    if (!PollUntil(sink, count)) GTEST_SKIP() << "this transport receives on threads of its own";
    ASSERT_LT(absl::Now(), bound);
  }
  EXPECT_FALSE(sink.overlapped());
}

TEST_P(PollingTest, TheChannelReceivesAgainAfterStopPolling) {
  RecordingSink sink;
  auto stream = OpenStream(&sink);
  for (size_t count = 2; count < 200; ++count) {
    ASSERT_TRUE(stream->Send(TextMessage("x")).ok());
    if (count % 10 == 0) {
      channel_->StopPolling();
      ASSERT_TRUE(sink.WaitForCount(count));
    } else if (!PollUntil(sink, count)) {
      ASSERT_TRUE(sink.WaitForCount(count));
    }
  }
}

TEST_P(PollingTest, TheChannelReceivesAgainWhenNobodyPolls) {
  RecordingSink sink;
  auto stream = OpenStream(&sink);
  for (size_t count = 2; count < 50; ++count) {
    ASSERT_TRUE(stream->Send(TextMessage("x")).ok());
    const bool polled = count % 10 != 0 && PollUntil(sink, count);
    ASSERT_TRUE(polled || sink.WaitForCount(count));
  }
}

TEST_P(PollingTest, ManyCallersReceiveInOrder) {
  constexpr size_t kMessages = 2000;
  RecordingSink sink;
  auto stream = OpenStream(&sink);
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) callers.emplace_back([&] { PollUntil(sink, kMessages + 1); });
  for (size_t i = 0; i < kMessages; ++i) ASSERT_TRUE(stream->Send(TextMessage("", absl::StrCat(i))).ok());
  for (std::thread& caller : callers) caller.join();
  channel_->StopPolling();
  ASSERT_TRUE(sink.WaitForCount(kMessages + 1));
  EXPECT_FALSE(sink.overlapped());
  const std::vector<Message> messages = sink.messages();
  for (size_t i = 0; i < kMessages; ++i) ASSERT_EQ(FrameOf(messages[i + 1]), absl::StrCat(i));
}

TEST_P(PollingTest, AStreamEndsWhileTheCallerReceives) {
  RecordingSink sink;
  auto stream = OpenStream(&sink);
  ASSERT_TRUE(stream->Send(TextMessage("x")).ok());
  PollUntil(sink, 2);
  channel_->Poll();
  // Nobody polls any more: closing must not wait for it.
  stream.reset();
  EXPECT_TRUE(sink.closed());
  channel_->Poll();
  channel_.reset();
}

INSTANTIATE_TEST_SUITE_P(All, PollingTest, ::testing::Values("inproc", "grpc", "tcp"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace gradwire::transport

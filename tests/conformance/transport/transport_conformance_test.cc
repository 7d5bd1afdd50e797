// The conformance suite of transports: the same tests over inproc, gRPC on TCP, gRPC on a unix socket, and plain TCP.
// To add a transport, add the address it listens on to EveryTransport.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/transport/transport.h"
#include "tests/conformance/transport/testing.h"
#include "tests/conformance/transport/transport_fixture.h"

namespace gradwire::transport {
namespace {

using namespace testing;  // NOLINT: tests/conformance/transport/testing.h
using ::testing::HasSubstr;

constexpr int64_t kCallTimeoutMs = 60000;

TEST_P(TransportTest, CallReturnsTheReply) {
  service_.on_call = [](Method method, std::string_view request) -> absl::StatusOr<std::string> {
    return absl::StrCat(std::string(method), ":", std::string(request));
  };
  const Running running = Start();
  auto reply = channel_->Call(kUnary, "hello", kCallTimeoutMs);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(*reply, absl::StrCat(std::string(kUnary), ":hello"));
  reply = channel_->Call(kUnary, "", kCallTimeoutMs);
  ASSERT_TRUE(reply.ok()) << reply.status();
}

TEST_P(TransportTest, CallPassesEveryErrorCodeUnchanged) {
  service_.on_call = [](Method, std::string_view request) -> absl::StatusOr<std::string> {
    const int code = std::stoi(std::string(request));
    return absl::Status(static_cast<absl::StatusCode>(code), absl::StrCat("code ", code, " \xC3\xA9 100%"));
  };
  const Running running = Start();
  for (int code = 1; code <= 16; ++code) {
    auto reply = channel_->Call(kUnary, absl::StrCat(code), kCallTimeoutMs);
    EXPECT_EQ(static_cast<int>(reply.status().code()), code);
    EXPECT_EQ(reply.status().message(), absl::StrCat("code ", code, " \xC3\xA9 100%"));
  }
}

TEST_P(TransportTest, CallMissesItsDeadline) {
  Gate gate;
  service_.on_call = [&](Method, std::string_view) -> absl::StatusOr<std::string> {
    gate.Pass();
    return "late";
  };
  const Running running = Start();
  auto reply = channel_->Call(kUnary, "x", 50);
  EXPECT_EQ(reply.status().code(), absl::StatusCode::kDeadlineExceeded) << reply.status();
  gate.Open();
}

TEST_P(TransportTest, UnknownMethodIsUnimplemented) {
  service_.on_call = [](Method method, std::string_view) -> absl::StatusOr<std::string> {
    return absl::UnimplementedError(absl::StrCat("no method ", std::string(method)));
  };
  service_.on_accept = [](Method, std::shared_ptr<Stream>) -> absl::StatusOr<std::unique_ptr<StreamSink>> {
    return absl::UnimplementedError("no such stream");
  };
  const Running running = Start();
  EXPECT_EQ(channel_->Call("gradwire.v1.Worker/Nope", "", kCallTimeoutMs).status().code(),
            absl::StatusCode::kUnimplemented);
  EXPECT_EQ(StreamStatus("gradwire.v1.Worker/Nope").code(), absl::StatusCode::kUnimplemented);
}

TEST_P(TransportTest, RefusedStreamClosesWithTheServicesStatus) {
  service_.on_accept = [](Method, std::shared_ptr<Stream>) -> absl::StatusOr<std::unique_ptr<StreamSink>> {
    return absl::PermissionDeniedError("not you");
  };
  const Running running = Start();
  const absl::Status status = StreamStatus(kStream);
  EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(status.message(), "not you");
}

TEST_P(TransportTest, ManySlowCallsRunAtOnce) {
  constexpr int kCalls = 24;
  absl::Mutex mu;
  int inside = 0;
  service_.on_call = [&](Method, std::string_view) -> absl::StatusOr<std::string> {
    absl::MutexLock lock(&mu);
    ++inside;
    const auto all = [&] { return inside == kCalls; };
    if (!mu.AwaitWithTimeout(absl::Condition(&all), HangBound())) return absl::DataLossError("hang");
    return "ok";
  };
  const Running running = Start();
  std::vector<std::thread> threads;
  for (int i = 0; i < kCalls; ++i)
    threads.emplace_back([&] { EXPECT_TRUE(channel_->Call(kUnary, "", kCallTimeoutMs).ok()); });
  for (auto& thread : threads) thread.join();
}

TEST_P(TransportTest, TenThousandSmallMessagesComeInOrder) {
  constexpr size_t kMessages = 10000;
  const Running running = Start();
  RecordingSink sink;
  auto stream = OpenStream(&sink);
  for (size_t i = 0; i < kMessages; ++i) ASSERT_TRUE(stream->Send(TextMessage(absl::StrCat(i))).ok());
  stream->Finish();
  EXPECT_TRUE(sink.Wait().ok());
  const auto messages = sink.messages();
  ASSERT_EQ(messages.size(), kMessages);
  for (size_t i = 0; i < kMessages; ++i) ASSERT_EQ(messages[i].control, TextMessage(absl::StrCat(i)).control);
  EXPECT_FALSE(sink.overlapped());
}

TEST_P(TransportTest, LargeFramesBothDirectionsAtOnce) {
  constexpr size_t kMessages = 64;
  const auto block = [](size_t i) { return std::string(kMiB, static_cast<char>('a' + i % 26)); };
  absl::Mutex mu;
  std::vector<std::thread> senders;
  std::atomic<size_t> good = 0;
  service_.on_accept = [&](Method, std::shared_ptr<Stream> stream) -> absl::StatusOr<std::unique_ptr<StreamSink>> {
    absl::MutexLock lock(&mu);
    senders.emplace_back([stream, block] {
      for (size_t i = 0; i < kMessages; ++i)
        if (!stream->Send(TextMessage("down", block(i))).ok()) return;
    });
    return std::make_unique<RecordingSink>([&, n = size_t{0}](Message m) mutable { good += FrameOf(m) == block(n++); });
  };
  const Running running = Start();
  size_t n = 0;
  std::atomic<size_t> received = 0;
  RecordingSink sink([&](Message m) { received += FrameOf(m) == block(n++); });
  auto stream = OpenStream(&sink);
  for (size_t i = 0; i < kMessages; ++i) ASSERT_TRUE(stream->Send(TextMessage("up", block(i))).ok());
  EXPECT_TRUE(sink.WaitForCount(kMessages));
  stream->Finish();
  EXPECT_TRUE(sink.Wait().ok());
  EXPECT_EQ(received, kMessages);
  EXPECT_EQ(good, kMessages);
  for (auto& sender : senders) sender.join();
}

TEST_P(TransportTest, FramesOfAnySlicing) {
  const Running running = Start();
  RecordingSink sink;
  auto stream = OpenStream(&sink);
  const size_t total[] = {0, 1, 2, 127, 128, 4095, 4096, 4097, 16384, 300000};
  const size_t slice[] = {1, 7, 4096, 100000};
  std::vector<std::string> want;
  for (size_t bytes : total) {
    for (size_t step : slice) {
      if (bytes / step > 5000) continue;
      Message message = TextMessage("x");
      std::string all;
      for (size_t i = 0; i < bytes; i += step) {
        std::string part(std::min(step, bytes - i), static_cast<char>(i * 31 + step));
        all += part;
        message.frame.push_back(Bytes::FromString(part));
        message.frame.push_back(Bytes());  // an empty slice changes nothing
      }
      want.push_back(all);
      ASSERT_TRUE(stream->Send(std::move(message)).ok());
    }
  }
  Message without_control;
  without_control.frame.push_back(Bytes::FromString("frame alone"));
  ASSERT_TRUE(stream->Send(without_control).ok());
  ASSERT_TRUE(stream->Send(Message{}).ok());
  stream->Finish();
  ASSERT_TRUE(sink.Wait().ok());
  const auto messages = sink.messages();
  ASSERT_EQ(messages.size(), want.size() + 2);
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_EQ(messages[i].control, TextMessage("x").control);
    EXPECT_TRUE(FrameOf(messages[i]) == want[i]) << "message " << i << " of " << want[i].size() << " bytes";
  }
  EXPECT_EQ(messages[want.size()].control, "");
  EXPECT_EQ(FrameOf(messages[want.size()]), "frame alone");
}

TEST_P(TransportTest, MessagesAreCompletedOnceBeforeTheyLeave) {
  const std::vector<size_t> sizes = {1, 4096, 300000, 3 * kMiB, 7 * kMiB};
  std::vector<std::atomic<int>> completed(sizes.size());
  std::vector<std::string> seen;  // when they come: in one process what is written later would be seen, too
  const Running running = Start();
  RecordingSink sink([&seen](const Message& message) { seen.push_back(FrameOf(message)); });
  auto stream = OpenStream(&sink);
  for (size_t i = 0; i < sizes.size(); ++i) {
    auto memory = std::make_shared<std::string>(sizes[i], '?');
    Message message = TextMessage("x");
    message.frame.push_back(Bytes::FromString("what is known before; "));
    message.frame.emplace_back(memory, reinterpret_cast<const uint8_t*>(memory->data()), memory->size());
    message.late = [memory, i, &completed] {
      ++completed[i];
      memory->assign(memory->size(), static_cast<char>('a' + i));
    };
    ASSERT_TRUE(stream->Send(std::move(message)).ok());
  }
  stream->Finish();
  ASSERT_TRUE(sink.Wait().ok());
  ASSERT_EQ(seen.size(), sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    EXPECT_EQ(completed[i], 1);
    EXPECT_TRUE(seen[i] == "what is known before; " + std::string(sizes[i], static_cast<char>('a' + i)))
        << "message " << i;
  }
}

TEST_P(TransportTest, ReceivedBytesOutliveTheStream) {
  const Running running = Start();
  std::vector<Message> messages;
  {
    RecordingSink sink;
    auto stream = OpenStream(&sink);
    ASSERT_TRUE(stream->Send(TextMessage("x", std::string(100000, 'k'))).ok());
    stream->Finish();
    ASSERT_TRUE(sink.Wait().ok());
    messages = sink.messages();
  }
  channel_.reset();
  listener_.reset();
  ASSERT_EQ(messages.size(), 1u);
  EXPECT_TRUE(FrameOf(messages[0]) == std::string(100000, 'k'));
}

TEST_P(TransportTest, BlockedSinksDoNotStopOtherStreamsOrCalls) {
  constexpr int kBlocked = 12;
  Gate gate;
  service_.on_accept = [&](Method method,
                           std::shared_ptr<Stream> stream) -> absl::StatusOr<std::unique_ptr<StreamSink>> {
    if (method == kStream) return std::make_unique<RecordingSink>([&gate](Message) { gate.Pass(); });
    return std::make_unique<RecordingSink>([stream](Message m) { (void)stream->Send(std::move(m)); });
  };
  const Running running = Start();
  std::vector<std::unique_ptr<RecordingSink>> sinks;
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < kBlocked; ++i) {
    sinks.push_back(std::make_unique<RecordingSink>());
    streams.push_back(OpenStream(sinks.back().get()));
    ASSERT_TRUE(streams.back()->Send(TextMessage("block")).ok());
  }
  RecordingSink sink;
  auto stream = OpenStream(&sink, kOtherStream);
  ASSERT_TRUE(stream->Send(TextMessage("echo")).ok());
  EXPECT_TRUE(sink.WaitForCount(1));
  EXPECT_TRUE(channel_->Call(kUnary, "x", kCallTimeoutMs).ok());
  gate.Open();
  for (auto& s : streams) s->Finish();
  for (auto& s : sinks) EXPECT_TRUE(s->Wait().ok());
}

TEST_P(TransportTest, ServerEndsWithStatusAfterItsMessages) {
  service_.on_accept = [](Method, std::shared_ptr<Stream> stream) -> absl::StatusOr<std::unique_ptr<StreamSink>> {
    return std::make_unique<RecordingSink>([stream](Message) {
      for (int i = 0; i < 10; ++i) (void)stream->Send(TextMessage(absl::StrCat(i), std::string(50000, 'x')));
      stream->Finish(absl::FailedPreconditionError("job is gone"));
    });
  };
  const Running running = Start();
  RecordingSink sink;
  auto stream = OpenStream(&sink);
  ASSERT_TRUE(stream->Send(TextMessage("go")).ok());
  const absl::Status status = sink.Wait();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(status.message(), "job is gone");
  EXPECT_EQ(sink.count(), 10u);
  EXPECT_FALSE(stream->Send(TextMessage("after")).ok());
}

TEST_P(TransportTest, ServerSinkIsClosedOnceForEveryWayToEnd) {
  absl::Mutex mu;
  std::vector<absl::Status> ends;
  service_.on_accept = [&](Method, std::shared_ptr<Stream> stream) -> absl::StatusOr<std::unique_ptr<StreamSink>> {
    return std::make_unique<RecordingSink>(
        [stream](Message m) {
          if (m.control == TextMessage("finish").control) stream->Finish(absl::OkStatus());
          if (m.control == TextMessage("cancel").control) stream->Cancel();
          (void)stream->Send(TextMessage("seen"));
        },
        [&](absl::Status status) {
          absl::MutexLock lock(&mu);
          ends.push_back(std::move(status));
        });
  };
  const Running running = Start();
  // The n-th end.
  const auto end = [&](size_t n) -> absl::Status {
    absl::MutexLock lock(&mu);
    const auto enough = [&] { return ends.size() >= n; };
    if (!mu.AwaitWithTimeout(absl::Condition(&enough), HangBound())) return absl::DataLossError("hang: no OnClosed");
    EXPECT_EQ(ends.size(), n);
    return ends.back();
  };
  {  // half-close by the client
    RecordingSink sink;
    auto stream = OpenStream(&sink);
    ASSERT_TRUE(stream->Send(TextMessage("hi")).ok());
    stream->Finish();
    EXPECT_TRUE(sink.Wait().ok());
    EXPECT_EQ(sink.count(), 1u);
    EXPECT_TRUE(end(1).ok());
  }
  {  // ended by the server
    RecordingSink sink;
    auto stream = OpenStream(&sink);
    ASSERT_TRUE(stream->Send(TextMessage("finish")).ok());
    EXPECT_TRUE(sink.Wait().ok());
    EXPECT_TRUE(end(2).ok());
  }
  {  // cancelled by the server
    RecordingSink sink;
    auto stream = OpenStream(&sink);
    ASSERT_TRUE(stream->Send(TextMessage("cancel")).ok());
    EXPECT_EQ(sink.Wait().code(), absl::StatusCode::kCancelled);
    EXPECT_EQ(end(3).code(), absl::StatusCode::kCancelled);
  }
  {  // cancelled by the client
    RecordingSink sink;
    auto stream = OpenStream(&sink);
    ASSERT_TRUE(stream->Send(TextMessage("hi")).ok());
    ASSERT_TRUE(sink.WaitForCount(1));
    stream->Cancel();
    EXPECT_EQ(sink.Wait().code(), absl::StatusCode::kCancelled);
    EXPECT_EQ(end(4).code(), absl::StatusCode::kCancelled);
  }
  {  // dropped by the client
    RecordingSink sink;
    auto stream = OpenStream(&sink);
    ASSERT_TRUE(stream->Send(TextMessage("hi")).ok());
    ASSERT_TRUE(sink.WaitForCount(1));
    stream.reset();
    EXPECT_TRUE(sink.closed());
    EXPECT_EQ(end(5).code(), absl::StatusCode::kCancelled);
  }
}

TEST_P(TransportTest, StreamDestroyedInsideItsSink) {
  const Running running = Start();
  Gate destroyed;
  std::unique_ptr<Stream> stream;
  Gate assigned;
  RecordingSink sink([&](Message) {
    assigned.Pass();
    stream.reset();
    destroyed.Open();
  });
  stream = OpenStream(&sink);
  ASSERT_TRUE(stream->Send(TextMessage("x")).ok());
  assigned.Open();
  EXPECT_TRUE(destroyed.Pass());
  channel_.reset();  // waits for what is left of the stream
  EXPECT_FALSE(sink.overlapped());
}

TEST_P(TransportTest, ClientDestroyedInMidStream) {
  Gate ended;
  service_.on_accept = [&](Method, std::shared_ptr<Stream> stream) -> absl::StatusOr<std::unique_ptr<StreamSink>> {
    return std::make_unique<RecordingSink>([stream](Message m) { (void)stream->Send(std::move(m)); },
                                           [&](absl::Status) { ended.Open(); });
  };
  const Running running = Start();
  RecordingSink sink;
  auto stream = OpenStream(&sink);
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(stream->Send(TextMessage("x", std::string(100000, 'y'))).ok());
  ASSERT_TRUE(sink.WaitForCount(1));
  channel_.reset();
  EXPECT_TRUE(sink.closed());
  EXPECT_TRUE(ended.Pass());
  EXPECT_FALSE(stream->Send(TextMessage("after")).ok());
}

TEST_P(TransportTest, ListenerDestroyedWithOpenStreams) {
  constexpr int kStreams = 4;
  const Running running = Start();
  std::vector<std::unique_ptr<RecordingSink>> sinks;
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < kStreams; ++i) {
    sinks.push_back(std::make_unique<RecordingSink>());
    streams.push_back(OpenStream(sinks.back().get()));
    ASSERT_TRUE(streams.back()->Send(TextMessage("x", std::string(100000, 'y'))).ok());
    ASSERT_TRUE(sinks.back()->WaitForCount(1));
  }
  listener_.reset();
  for (auto& sink : sinks) EXPECT_EQ(sink->Wait().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(channel_->Call(kUnary, "", kCallTimeoutMs).status().code(), absl::StatusCode::kUnavailable);
}

TEST_P(TransportTest, TooLargeMessageIsRefused) {
  limits_.max_message_bytes = kMiB;
  std::atomic<size_t> received = 0;
  service_.on_accept = [&](Method, std::shared_ptr<Stream>) -> absl::StatusOr<std::unique_ptr<StreamSink>> {
    return std::make_unique<RecordingSink>([&](Message) { ++received; });
  };
  const Running running = Start();
  RecordingSink sink;
  auto stream = OpenStream(&sink);
  (void)stream->Send(TextMessage("x", std::string(2 * kMiB, 'y')));
  EXPECT_EQ(sink.Wait().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(received, 0u);
  EXPECT_EQ(channel_->Call(kUnary, std::string(2 * kMiB, 'y'), kCallTimeoutMs).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(channel_->Call(kUnary, "still there", kCallTimeoutMs).ok());
}

TEST_P(TransportTest, SixteenStreamsAtOnce) {
  constexpr int kStreams = 16;
  constexpr size_t kMessages = 50;
  const Running running = Start();
  std::vector<std::thread> threads;
  for (int t = 0; t < kStreams; ++t) {
    threads.emplace_back([&, t] {
      RecordingSink sink;
      auto stream = OpenStream(&sink, t % 2 ? kStream : kOtherStream);
      const std::string frame(20000, static_cast<char>('a' + t));
      for (size_t i = 0; i < kMessages; ++i) ASSERT_TRUE(stream->Send(TextMessage(absl::StrCat(i), frame)).ok());
      stream->Finish();
      EXPECT_TRUE(sink.Wait().ok());
      const auto messages = sink.messages();
      ASSERT_EQ(messages.size(), kMessages);
      for (size_t i = 0; i < kMessages; ++i) {
        EXPECT_EQ(messages[i].control, TextMessage(absl::StrCat(i)).control);
        EXPECT_TRUE(FrameOf(messages[i]) == frame);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST_P(TransportTest, ReconnectsWhenTheListenerComesBack) {
  const Running running = Start();
  ASSERT_TRUE(channel_->Call(kUnary, "", kCallTimeoutMs).ok());
  const std::string address = listener_->address();
  listener_.reset();
  EXPECT_EQ(channel_->Call(kUnary, "", kCallTimeoutMs).status().code(), absl::StatusCode::kUnavailable);
  StartListener(address);
  const absl::Time bound = absl::Now() + HangBound();
  absl::Status status = absl::UnavailableError("not tried");
  while (!status.ok() && absl::Now() < bound) {
    status = channel_->Call(kUnary, "", kCallTimeoutMs).status();
    std::this_thread::yield();
  }
  EXPECT_TRUE(status.ok()) << status;
  RecordingSink sink;
  auto stream = OpenStream(&sink);
  ASSERT_TRUE(stream->Send(TextMessage("x")).ok());
  EXPECT_TRUE(sink.WaitForCount(1));
}

TEST_P(TransportTest, NobodyListens) {
  const Running running = Start();
  listener_.reset();
  EXPECT_EQ(channel_->Call(kUnary, "", kCallTimeoutMs).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(StreamStatus(kStream).code(), absl::StatusCode::kUnavailable);
}

TEST_P(TransportTest, AddressInUse) {
  const Running running = Start();
  auto second = Listen(listener_->address(), &service_, limits_);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable) << second.status();
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("address in use"));
}

INSTANTIATE_TEST_SUITE_P(All, TransportTest, EveryTransport(), [](const auto& info) { return info.param; });

}  // namespace
}  // namespace gradwire::transport

// A service that finds no memory or cannot start a thread, over every transport that has a network: what was asked of
// it is refused, and the listener goes on serving, also those who were there before.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/conformance/transport/testing.h"

namespace gradwire::transport {
namespace {

using namespace testing;  // NOLINT: tests/conformance/transport/testing.h
using ::testing::HasSubstr;

constexpr int kExhaustedCallMs = 60'000;
constexpr int kTimes = 300;  // more than a connection may have calls at once: none is left behind

class ExhaustedTest : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  // Once the service has its functions, which connections read.
  void Start() {
    auto listener = Listen(absl::StrCat(std::get<0>(GetParam()), "://127.0.0.1:0"), &service_, limits_);
    ASSERT_TRUE(listener.ok()) << listener.status();
    listener_ = *std::move(listener);
    bystander_ = *Dial(listener_->address(), limits_);
    stream_ = *bystander_->Open(kStream, &echoes_);
    channel_ = *Dial(listener_->address(), limits_);
  }
  void TearDown() override { stream_.reset(); }

  [[noreturn]] static void Throw() {
    if (std::get<1>(GetParam()) == "memory") throw std::bad_alloc();
    throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again), "no thread");
  }
  static void ExpectRefused(const absl::Status& status) {
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::get<1>(GetParam()))) << "says of what";
  }
  // The stream that was there goes on, and who was refused is served.
  void ExpectServing() {
    ASSERT_TRUE(stream_->Send(TextMessage("x")).ok());
    EXPECT_TRUE(echoes_.WaitForCount(++sent_));
    const auto reply = channel_->Call(kUnary, "hello", kExhaustedCallMs);
    EXPECT_TRUE(reply.ok()) << reply.status();
    RecordingSink sink;
    auto stream = *channel_->Open(kStream, &sink);
    ASSERT_TRUE(stream->Send(TextMessage("y")).ok());
    EXPECT_TRUE(sink.WaitForCount(1));
    stream.reset();
  }

  Limits limits_;
  TestService service_;
  std::unique_ptr<Listener> listener_;
  RecordingSink echoes_;
  std::shared_ptr<Channel> bystander_;
  std::unique_ptr<Stream> stream_;
  size_t sent_ = 0;
  std::shared_ptr<Channel> channel_;
};

TEST_P(ExhaustedTest, ACallIsRefused) {
  service_.on_call = [](Method, std::string_view request) -> absl::StatusOr<std::string> {
    if (request == "much") Throw();
    return std::string(request);
  };
  Start();
  for (int i = 0; i < kTimes; ++i) {
    ExpectRefused(channel_->Call(kUnary, "much", kExhaustedCallMs).status());
    ASSERT_FALSE(HasFailure()) << i;
  }
  ExpectServing();
}

TEST_P(ExhaustedTest, AStreamIsRefused) {
  service_.on_accept = [](Method method,
                          std::shared_ptr<Stream> stream) -> absl::StatusOr<std::unique_ptr<StreamSink>> {
    if (method == kOtherStream) Throw();
    return std::make_unique<RecordingSink>([stream](Message message) { (void)stream->Send(std::move(message)); });
  };
  Start();
  for (int i = 0; i < kTimes; ++i) {
    RecordingSink sink;
    auto stream = *channel_->Open(kOtherStream, &sink);
    ExpectRefused(sink.Wait());
    stream.reset();
    ASSERT_FALSE(HasFailure()) << i;
  }
  ExpectServing();
}

TEST_P(ExhaustedTest, AMessageEndsItsStream) {
  std::atomic<int> ends = 0;
  service_.on_accept = [&](Method method,
                           std::shared_ptr<Stream> stream) -> absl::StatusOr<std::unique_ptr<StreamSink>> {
    if (method != kOtherStream)
      return std::make_unique<RecordingSink>([stream](Message message) { (void)stream->Send(std::move(message)); });
    return std::make_unique<RecordingSink>([](const Message&) { Throw(); }, [&ends](const absl::Status&) { ++ends; });
  };
  Start();
  for (int i = 0; i < kTimes; ++i) {
    RecordingSink sink;
    auto stream = *channel_->Open(kOtherStream, &sink);
    ASSERT_TRUE(stream->Send(TextMessage("x", std::string(100'000, 'f'))).ok());
    ExpectRefused(sink.Wait());
    stream.reset();
    ASSERT_FALSE(HasFailure()) << i;
  }
  ExpectServing();
  stream_.reset();
  listener_.reset();
  EXPECT_EQ(ends, kTimes) << "each sink hears of its end, once";
}

TEST_P(ExhaustedTest, AStreamThatIsNotReadCanBeCancelledAfterItsEnd) {
  constexpr int kMessages = 64;
  constexpr size_t kBytes = 1 << 20;
  limits_.send_window_bytes = 2 * kMessages * kBytes;  // what is unsent keeps no read back
  // Over gRPC it ends at once, or with the connection; over others within twice that time.
  limits_.keepalive_ms = std::get<0>(GetParam()) != "grpc" ? 1000 : 2 * absl::ToInt64Milliseconds(HangBound());
  std::shared_ptr<Stream> ending;
  Gate accepted, closed;
  service_.on_accept = [&](Method method,
                           std::shared_ptr<Stream> stream) -> absl::StatusOr<std::unique_ptr<StreamSink>> {
    if (method != kOtherStream)
      return std::make_unique<RecordingSink>([stream](Message message) { (void)stream->Send(std::move(message)); });
    ending = stream;
    for (int i = 0; i < kMessages; ++i) (void)stream->Send(TextMessage("x", std::string(kBytes, 'f')));
    accepted.Open();
    return std::make_unique<RecordingSink>([](const Message&) { Throw(); },
                                           [&closed](const absl::Status&) { closed.Open(); });
  };
  Start();
  Gate gate;
  RecordingSink deaf([&](const Message&) { gate.Pass(); });
  auto stream = *channel_->Open(kOtherStream, &deaf);
  ASSERT_TRUE(accepted.Pass());
  absl::SleepFor(absl::Milliseconds(500));  // until nothing more goes through
  ASSERT_TRUE(stream->Send(TextMessage("x")).ok());
  absl::Status sent;
  while ((sent = ending->Send(TextMessage("y"))).ok()) absl::SleepFor(absl::Milliseconds(1));
  ExpectRefused(sent);
  ending->Cancel();
  EXPECT_TRUE(closed.Pass()) << "it waits for who does not read";
  gate.Open();
  stream.reset();
  ending.reset();
  ExpectServing();
}

INSTANTIATE_TEST_SUITE_P(All, ExhaustedTest,
                         ::testing::Combine(::testing::Values("grpc", "tcp"), ::testing::Values("memory", "thread")),
                         [](const auto& info) { return std::get<0>(info.param) + "_" + std::get<1>(info.param); });

}  // namespace
}  // namespace gradwire::transport

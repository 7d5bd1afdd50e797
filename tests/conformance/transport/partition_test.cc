// A connection that falls silent without being closed, as in a network partition: keepalive tells both ends.
#include <gtest/gtest.h>

#include "tests/conformance/transport/testing.h"
#include "tests/lib/tcp_proxy.h"

namespace gradwire::transport {
namespace {

using namespace testing;  // NOLINT: tests/conformance/transport/testing.h
using testing_support::TcpProxy;

class PartitionTest : public ::testing::TestWithParam<std::string> {};

TEST_P(PartitionTest, KeepaliveEndsSilentStreamsAtBothEndsAndTheChannelComesBack) {
  Limits limits;
  limits.keepalive_ms = 250;
  TestService service;
  absl::Mutex mu;
  absl::Status ended_at_server;
  bool server_ended = false;
  service.on_accept = [&](Method, std::shared_ptr<Stream> stream) {
    return std::make_unique<RecordingSink>([stream](Message message) { (void)stream->Send(std::move(message)); },
                                           [&](absl::Status status) {
                                             absl::MutexLock lock(&mu);
                                             if (server_ended) return;  // the first stream counts
                                             ended_at_server = std::move(status);
                                             server_ended = true;
                                           });
  };
  auto listener = Listen(GetParam() + "://127.0.0.1:0", &service, limits);
  ASSERT_TRUE(listener.ok()) << listener.status();
  TcpProxy proxy((*listener)->address());
  auto channel = Dial(proxy.address(), limits);
  ASSERT_TRUE(channel.ok()) << channel.status();
  RecordingSink sink;
  auto stream = (*channel)->Open(kStream, &sink);
  ASSERT_TRUE(stream.ok()) << stream.status();
  ASSERT_TRUE((*stream)->Send(TextMessage("before")).ok());
  ASSERT_TRUE(sink.WaitForCount(1));

  proxy.Cut();
  EXPECT_TRUE(absl::IsUnavailable(sink.Wait())) << sink.Wait();
  {
    absl::MutexLock lock(&mu);
    ASSERT_TRUE(mu.AwaitWithTimeout(absl::Condition(&server_ended), HangBound()));
    EXPECT_TRUE(absl::IsCancelled(ended_at_server)) << ended_at_server;
  }
  const auto unanswered = (*channel)->Call(kUnary, "during", 300);
  EXPECT_TRUE(absl::IsUnavailable(unanswered.status()) || absl::IsDeadlineExceeded(unanswered.status()))
      << unanswered.status();

  proxy.Heal();
  absl::StatusOr<std::string> answered = absl::UnknownError("not tried");
  const absl::Time deadline = absl::Now() + HangBound();
  while (!answered.ok() && absl::Now() < deadline) answered = (*channel)->Call(kUnary, "after", 1000);
  ASSERT_TRUE(answered.ok()) << answered.status();
  EXPECT_EQ(*answered, "after");
  RecordingSink again;
  auto second = (*channel)->Open(kStream, &again);
  ASSERT_TRUE(second.ok()) << second.status();
  ASSERT_TRUE((*second)->Send(TextMessage("after")).ok());
  EXPECT_TRUE(again.WaitForCount(1));
  second->reset();
  stream->reset();
  channel->reset();
  listener->reset();
}

INSTANTIATE_TEST_SUITE_P(All, PartitionTest, ::testing::Values("grpc", "tcp"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace gradwire::transport

// Bits that flip on the way, over every transport that has a network: what arrives is what was sent, or the call or
// stream fails soon; nothing is taken for something else, and nobody waits.
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/transport/transport.h"
#include "tests/conformance/transport/testing.h"
#include "tests/lib/tcp_proxy.h"

namespace gradwire::transport {
namespace {

using namespace testing;  // NOLINT: tests/conformance/transport/testing.h
using testing_support::TcpProxy;

class DamageTest : public ::testing::TestWithParam<std::string> {};

TEST_P(DamageTest, CallsAreAnsweredRightOrFail) {
  TestService service;
  std::atomic<int> strange = 0;
  service.on_call = [&](Method method, std::string_view request) -> absl::StatusOr<std::string> {
    if (method != kUnary || request.substr(0, 8) != "request ") ++strange;
    if (request.ends_with("7")) return absl::NotFoundError(std::string(request));
    return std::string(request);
  };
  auto listener = *Listen(absl::StrCat(GetParam(), "://127.0.0.1:0"), &service);
  TcpProxy proxy(listener->address());
  auto channel = *Dial(proxy.address());
  proxy.FlipBits(/*gap_bytes=*/500, /*seed=*/5);
  int answered = 0;
  // Calls fail at once while a channel waits to connect anew, so their number says little.
  const absl::Time bound = absl::Now() + HangBound();
  const auto enough = [&] { return answered >= 10 && proxy.flips() >= 20; };
  for (int i = 0; i < 100 || (!enough() && absl::Now() < bound); ++i) {
    const std::string request = absl::StrCat("request ", i);
    const auto reply = channel->Call(kUnary, request, 500);
    if (reply.ok()) {
      EXPECT_EQ(*reply, request);
      EXPECT_NE(i % 10, 7);
    } else if (absl::IsNotFound(reply.status())) {
      EXPECT_EQ(std::string(reply.status().message()), request);
    } else {
      EXPECT_TRUE(absl::IsUnavailable(reply.status()) || absl::IsDeadlineExceeded(reply.status()) ||
                  absl::IsResourceExhausted(reply.status()) || absl::IsUnimplemented(reply.status()) ||
                  absl::IsCancelled(reply.status()))
          << reply.status();
      continue;
    }
    ++answered;
  }
  EXPECT_EQ(strange, 0) << "a damaged request was served";
  EXPECT_TRUE(enough()) << answered << " calls were answered, " << proxy.flips() << " bits flipped";
}

TEST_P(DamageTest, StreamsDeliverWhatWasSentUntilTheyEnd) {
  TestService service;
  Limits limits;
  limits.keepalive_ms = 500;
  auto listener = *Listen(absl::StrCat(GetParam(), "://127.0.0.1:0"), &service, limits);
  TcpProxy proxy(listener->address());
  auto channel = *Dial(proxy.address(), limits);
  proxy.FlipBits(/*gap_bytes=*/4000, /*seed=*/6);
  size_t echoed = 0;
  const absl::Time enough = absl::Now() + HangBound();
  for (int attempt = 0; attempt < 25 || ((echoed < 200 || proxy.flips() < 20) && absl::Now() < enough); ++attempt) {
    RecordingSink sink;
    auto stream = *channel->Open(kStream, &sink);
    size_t sent = 0;
    while (sent < 200 && stream->Send(TextMessage(absl::StrCat("message ", sent))).ok()) ++sent;
    const absl::Time bound = absl::Now() + HangBound();
    while (!sink.closed() && sink.count() < sent && absl::Now() < bound) absl::SleepFor(absl::Milliseconds(5));
    EXPECT_TRUE(sink.closed() || sink.count() == sent) << "attempt " << attempt << " waits for what cannot come";
    stream.reset();
    const std::vector<Message> messages = sink.messages();
    for (size_t i = 0; i < messages.size(); ++i)
      ASSERT_EQ(messages[i].control, TextMessage(absl::StrCat("message ", i)).control) << "attempt " << attempt;
    echoed += messages.size();
  }
  EXPECT_GE(echoed, 200u);
  EXPECT_GE(proxy.flips(), 20u);
}

// gRPC's header tables outlive the call that filled them: where one was damaged, every later call of the connection
// would be.
TEST_P(DamageTest, OneFlippedBitSpoilsNoLaterConnection) {
  TestService service;
  Limits limits;
  limits.keepalive_ms = 200;  // a damaged length is waited for that long
  auto listener = *Listen(absl::StrCat(GetParam(), "://127.0.0.1:0"), &service, limits);
  TcpProxy proxy(listener->address());
  for (size_t at = 0; at < 900; at += 4) {
    auto channel = *Dial(proxy.address(), limits);
    proxy.FlipOnce(at, static_cast<int>(at / 4 % 8));
    bool echoed = false;
    int refused = 0;  // although there is such a method, and room for the message
    const absl::Time bound = absl::Now() + absl::Seconds(20);
    // The flip may also come in a later stream.
    for (int good = 0; good < 3 && refused <= 2 && absl::Now() < bound;) {
      RecordingSink sink;
      auto stream = *channel->Open(kStream, &sink);
      stream->Send(TextMessage("message")).IgnoreError();
      while (!sink.closed() && sink.count() == 0 && absl::Now() < bound) absl::SleepFor(absl::Microseconds(200));
      good = sink.count() > 0 ? good + 1 : 0;
      echoed = good > 0;
      if (good > 0) continue;
      const bool broken = absl::IsUnavailable(sink.Wait());
      refused += broken ? 0 : 1;
      if (broken) absl::SleepFor(absl::Milliseconds(5));
    }
    EXPECT_TRUE(echoed) << "byte " << at;
    EXPECT_LE(refused, 2) << "byte " << at;
  }
  EXPECT_GT(proxy.flips(), 50u);
}

INSTANTIATE_TEST_SUITE_P(All, DamageTest, ::testing::Values("grpc", "tcp"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace gradwire::transport

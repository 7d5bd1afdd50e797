// ListenInProcess: who dials, in the process of a listener, the address that others dial reaches it past the network.
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/transport/transport.h"
#include "tests/conformance/transport/testing.h"

namespace gradwire::transport {
namespace {

using namespace testing;  // NOLINT: tests/conformance/transport/testing.h

class InProcessTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { listener_ = *Listen(absl::StrCat(GetParam(), "://127.0.0.1:0"), &network_); }

  std::string address() const { return listener_->address(); }
  std::unique_ptr<Listener> Within() { return *ListenInProcess(address(), &process_); }
  // Whom a channel leads to.
  static std::string Reached(Channel& channel) { return channel.Call(kUnary, "", 60000).value_or("nobody"); }
  static std::string Reached(const std::string& address) { return Reached(**Dial(address)); }

  TestService network_ = Named("network");
  TestService process_ = Named("process");
  std::unique_ptr<Listener> listener_;

 private:
  static TestService Named(const std::string& name) {
    TestService service;
    service.on_call = [name](Method, std::string_view) -> absl::StatusOr<std::string> { return name; };
    return service;
  }
};

TEST_P(InProcessTest, LeadsPastTheNetworkWhileItLives) {
  EXPECT_EQ(Reached(address()), "network");
  {
    const auto within = Within();
    EXPECT_EQ(Reached(address()), "process");
    EXPECT_EQ(within->address(), absl::StrCat("inproc://", address()));
  }
  EXPECT_EQ(Reached(address()), "network");
}

TEST_P(InProcessTest, OtherSpellingsAndOlderChannelsStayOnTheNetwork) {
  const std::shared_ptr<Channel> older = *Dial(address());
  const auto within = Within();
  EXPECT_EQ(Reached(*older), "network");
  EXPECT_EQ(Reached(absl::StrReplaceAll(address(), {{"127.0.0.1", "localhost"}})), "network");
}

TEST_P(InProcessTest, AChannelFindsWhoComesInItsPlace) {
  auto within = Within();
  const std::shared_ptr<Channel> channel = *Dial(address());
  EXPECT_FALSE(channel->Poll());
  within.reset();
  EXPECT_EQ(Reached(*channel), "network");
  EXPECT_TRUE(channel->Poll());
  channel->StopPolling();
  within = Within();
  EXPECT_EQ(Reached(*channel), "process");
  within.reset();
  listener_.reset();
  EXPECT_EQ(Reached(*channel), "nobody");
}

TEST_P(InProcessTest, HandsFramesOver) {
  const auto within = Within();
  const std::shared_ptr<Channel> channel = *Dial(address());
  RecordingSink sink;
  auto stream = *channel->Open(kStream, &sink);
  Message message = TextMessage("frame", std::string(1 << 20, 'x'));
  const auto* const sent = message.frame[0].data();
  ASSERT_TRUE(stream->Send(std::move(message)).ok());
  ASSERT_TRUE(sink.WaitForCount(1));  // the service sends back what came
  EXPECT_EQ(sink.messages()[0].frame[0].data(), sent);
  stream->Finish();
  EXPECT_TRUE(sink.Wait().ok());
}

TEST_P(InProcessTest, RefusesWhatIsTakenOrNoAddress) {
  const auto within = Within();
  EXPECT_EQ(ListenInProcess(address(), &process_).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ListenInProcess("nothing", &process_).status().code(), absl::StatusCode::kInvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(All, InProcessTest, ::testing::Values("grpc", "tcp"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace gradwire::transport

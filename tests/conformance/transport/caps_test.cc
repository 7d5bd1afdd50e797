// What strangers may take of a listener, over every transport that has a network: idle connections make room, streams
// and handshakes have caps, descriptors that ran out come back.
#include "common/transport/caps.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/conformance/transport/testing.h"

namespace gradwire::transport {
namespace {

using namespace testing;  // NOLINT: tests/conformance/transport/testing.h

constexpr int kPatienceMs = 60'000;
constexpr int kMostDescriptors = 4096;  // of this test

class CapsTest : public ::testing::TestWithParam<std::string> {
 protected:
  void Start() {
    auto listener = ListenWithin(absl::StrCat(GetParam(), "://127.0.0.1:0"), &service_, limits_, caps_);
    ASSERT_TRUE(listener.ok()) << listener.status();
    listener_ = *std::move(listener);
  }
  std::shared_ptr<Channel> Connect() { return *Dial(listener_->address(), limits_); }
  // Sockets; fewer where descriptors run out.
  static std::vector<int> RawSockets(size_t count) {
    std::vector<int> sockets;
    while (sockets.size() < count) {
      const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      if (fd < 0) break;
      sockets.push_back(fd);
    }
    return sockets;
  }
  // Asked one by one: reading /proc/self/fd opens one, and ThreadSanitizer mistakes its number for that of a connection
  // that had it before.
  static size_t Descriptors() {
    size_t open = 0;
    for (int fd = 0; fd < kMostDescriptors; ++fd) open += fcntl(fd, F_GETFD) != -1 ? 1 : 0;
    return open;
  }
  // Connections that say nothing.
  void ConnectRaw(const std::vector<int>& sockets) const {
    const std::string address = listener_->address();
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    name.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
    for (int fd : sockets) EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&name), sizeof(name)), 0);
  }

  Limits limits_;
  Caps caps_;
  TestService service_;
  std::unique_ptr<Listener> listener_;
};

TEST_P(CapsTest, IdleConnectionsMakeRoomAndStreamsDoNot) {
  caps_.max_connections = 12;
  Start();
  auto busy = Connect();
  RecordingSink sink;
  auto stream = *busy->Open(kStream, &sink);
  ASSERT_TRUE(stream->Send(TextMessage("x")).ok());
  ASSERT_TRUE(sink.WaitForCount(1));
  std::vector<std::shared_ptr<Channel>> idle;
  for (int i = 0; i < 40; ++i) {
    idle.push_back(Connect());
    const auto reply = idle.back()->Call(kUnary, "one call", kPatienceMs);
    ASSERT_TRUE(reply.ok()) << i << ": " << reply.status();
  }
  ASSERT_TRUE(stream->Send(TextMessage("y")).ok());
  EXPECT_TRUE(sink.WaitForCount(2)) << "the stream was in use";
  // Who made room connects anew.
  absl::StatusOr<std::string> again = absl::UnknownError("not tried");
  const absl::Time bound = absl::Now() + HangBound();
  while (!again.ok() && absl::Now() < bound) again = idle.front()->Call(kUnary, "again", kPatienceMs);
  EXPECT_TRUE(again.ok()) << again.status();
  stream.reset();
}

TEST_P(CapsTest, ConnectionsInUseAreNotGivenUpForNewOnes) {
  caps_.max_connections = 4;
  std::atomic<int> warned = 0;
  caps_.warn = [&](const std::string& what) { warned += absl::StrContains(what, "--max-connections") ? 1 : 0; };
  Start();
  std::vector<std::shared_ptr<Channel>> channels;
  std::vector<std::unique_ptr<RecordingSink>> sinks;
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < 4; ++i) {
    channels.push_back(Connect());
    sinks.push_back(std::make_unique<RecordingSink>());
    streams.push_back(*channels.back()->Open(kStream, sinks.back().get()));
    ASSERT_TRUE(streams.back()->Send(TextMessage("x")).ok());
    ASSERT_TRUE(sinks.back()->WaitForCount(1)) << i;
  }
  EXPECT_FALSE(Connect()->Call(kUnary, "one too many", 1000).ok());
  EXPECT_GE(Warnings(warned), 1);
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(streams[i]->Send(TextMessage("y")).ok());
    EXPECT_TRUE(sinks[i]->WaitForCount(2)) << i;
  }
  streams.clear();
  channels.clear();
  absl::StatusOr<std::string> later = absl::UnknownError("not tried");
  const absl::Time bound = absl::Now() + HangBound();
  while (!later.ok() && absl::Now() < bound) later = Connect()->Call(kUnary, "later", kPatienceMs);
  EXPECT_TRUE(later.ok()) << later.status();
}

TEST_P(CapsTest, StreamsBeyondTheCapAreRefused) {
  caps_.max_streams = 2;
  Start();
  auto channel = Connect();
  RecordingSink sinks[3];
  std::unique_ptr<Stream> streams[3];
  for (int i = 0; i < 2; ++i) {
    streams[i] = *channel->Open(kStream, &sinks[i]);
    ASSERT_TRUE(streams[i]->Send(TextMessage("x")).ok());
    ASSERT_TRUE(sinks[i].WaitForCount(1));
  }
  streams[2] = *channel->Open(kStream, &sinks[2]);
  EXPECT_TRUE(absl::IsResourceExhausted(sinks[2].Wait())) << sinks[2].Wait();
  for (auto& stream : streams) stream.reset();
}

// A crowd that says nothing: no more of it is held than the cap says, and who speaks gets in while it stands there.
TEST_P(CapsTest, HandshakesHaveACapAndWhoSpeaksGetsIn) {
  constexpr size_t kCap = 8;
  constexpr size_t kCrowd = 20;
  caps_.max_handshakes = kCap;
  limits_.keepalive_ms = 1000;  // without a cap the silent ones would be held for twice this
  Start();
  const auto before = Connect();
  ASSERT_TRUE(before->Call(kUnary, "before", kPatienceMs).ok());
  const auto honest = Connect();
  const std::vector<int> crowd = RawSockets(kCrowd);
  const size_t others = Descriptors();
  ConnectRaw(crowd);
  absl::StatusOr<std::string> reply = absl::UnknownError("not tried");
  std::atomic<bool> done = false;
  std::thread caller([&] {
    reply = honest->Call(kUnary, "honest", kPatienceMs);
    done = true;
  });
  // Those that are cut off go at once, not in no time. Two descriptors are both ends of the honest connection.
  absl::Duration too_many = absl::ZeroDuration();
  const absl::Time began = absl::Now();
  for (absl::Time now = began; !done || now < began + absl::Seconds(1); now = absl::Now()) {
    absl::SleepFor(absl::Milliseconds(5));
    if (Descriptors() > others + kCap + 2) too_many += absl::Now() - now;
  }
  caller.join();
  EXPECT_TRUE(reply.ok()) << reply.status();
  EXPECT_LT(too_many, absl::Milliseconds(500)) << "more than " << kCap << " of " << kCrowd << " were held";
  for (int fd : crowd) close(fd);
}

// As 1,100 connections to a process that may have 1,024 descriptors: it says so, and afterwards it serves.
TEST_P(CapsTest, DescriptorsThatRanOutComeBack) {
  limits_.keepalive_ms = 500;
  std::atomic<int> warned = 0;
  caps_.warn = [&](const std::string& what) { warned += absl::StrContains(what, "could not be accepted") ? 1 : 0; };
  Start();
  ASSERT_TRUE(Connect()->Call(kUnary, "before", kPatienceMs).ok());
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &old), 0);
  const int highest = dup(0);
  close(highest);
  rlimit low = old;
  low.rlim_cur = static_cast<rlim_t>(highest) + 64;  // this process is both ends
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  std::vector<int> crowd = RawSockets(20);
  ConnectRaw(crowd);
  const std::vector<int> rest = RawSockets(200);  // all that is left: there is none to accept with
  ConnectRaw(rest);
  const int warnings = Warnings(warned);
  for (int fd : crowd) close(fd);
  for (int fd : rest) close(fd);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &old), 0);
  EXPECT_GE(warnings, 1) << "of a listener that cannot accept";
  EXPECT_LT(rest.size(), 200u);
  absl::StatusOr<std::string> after = absl::UnknownError("not tried");
  const absl::Time bound = absl::Now() + HangBound();
  while (!after.ok() && absl::Now() < bound) after = Connect()->Call(kUnary, "after", 5000);
  EXPECT_TRUE(after.ok()) << after.status();
}

INSTANTIATE_TEST_SUITE_P(All, CapsTest, ::testing::Values("grpc", "tcp"), [](const auto& info) { return info.param; });

}  // namespace
}  // namespace gradwire::transport

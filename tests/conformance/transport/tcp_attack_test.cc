// Peers of tcp:// that are strangers, broken, silent or hostile: each is refused, and the listener serves on.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/base/crc32c.h"
#include "common/transport/asio/tcp_format.h"
#include "common/transport/caps.h"
#include "common/transport/transport.h"
#include "tests/conformance/transport/testing.h"

namespace gradwire::transport {
namespace {

using namespace testing;  // NOLINT: tests/conformance/transport/testing.h
using tcp::PacketType;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr int kHangMs = 60000;
constexpr size_t kMiB = 1 << 20;

std::string Preface() {
  const auto bytes = tcp::StorePreface();
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string HeaderBytes(PacketType type, size_t control_bytes, size_t body_bytes, uint32_t check = 0) {
  const auto bytes = tcp::StoreHeader(
      {type, absl::StatusCode::kOk, static_cast<uint32_t>(control_bytes), static_cast<uint32_t>(body_bytes), check});
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string PacketBytes(PacketType type, const std::string& control = "", const std::string& body = "") {
  const Bytes part = Bytes::FromString(body);
  return HeaderBytes(type, control.size(), body.size(), tcp::PartsCheck(type, control, {&part, 1})) + control + body;
}

std::string OpenBytes() { return Preface() + PacketBytes(PacketType::kOpen, std::string(kStream)); }

// A bare connection to a listener, or from a client to a server of the test's own.
class RawPeer {
 public:
  explicit RawPeer(int fd) : fd_(fd) {}
  explicit RawPeer(const std::string& address) : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    name.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
    EXPECT_EQ(connect(fd_, reinterpret_cast<sockaddr*>(&name), sizeof(name)), 0);
  }
  RawPeer(RawPeer&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  ~RawPeer() {
    if (fd_ >= 0) close(fd_);
  }

  // False when the peer takes no more.
  bool Send(const std::string& bytes) {
    for (size_t sent = 0; sent < bytes.size();) {
      const ssize_t n = send(fd_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
      if (n <= 0) return false;
      sent += static_cast<size_t>(n);
    }
    return true;
  }
  // Up to the end of the connection, or `bytes` bytes.
  std::string Read(size_t bytes = SIZE_MAX) {
    std::string all;
    char buffer[4096];
    while (all.size() < bytes) {
      pollfd wait{fd_, POLLIN, 0};
      if (poll(&wait, 1, kHangMs) != 1) {
        ADD_FAILURE() << "hang: the connection stays";
        break;
      }
      const ssize_t n = recv(fd_, buffer, std::min(bytes - all.size(), sizeof(buffer)), 0);
      if (n <= 0) break;
      all.append(buffer, static_cast<size_t>(n));
    }
    return all;
  }
  // Reads up to the end: preface, then a status with this code, after any number of other packets.
  void ExpectStatus(absl::StatusCode code) {
    const std::string all = Read();
    ASSERT_THAT(all, StartsWith(Preface()));
    std::string rest = all.substr(Preface().size());
    while (rest.size() >= tcp::kHeaderBytes) {
      const auto header = tcp::LoadHeader(std::span<const uint8_t, tcp::kHeaderBytes>(
          reinterpret_cast<const uint8_t*>(rest.data()), tcp::kHeaderBytes));
      ASSERT_TRUE(header.ok());
      rest = rest.substr(std::min(rest.size(), tcp::kHeaderBytes + header->control_bytes + header->body_bytes));
      if (header->type != PacketType::kStatus) continue;
      EXPECT_EQ(header->code, code);
      EXPECT_EQ(rest, "");
      return;
    }
    ADD_FAILURE() << "no status in " << all.size() << " bytes";
  }

 private:
  int fd_;
};

class TcpAttackTest : public ::testing::Test {
 protected:
  void Start() {
    auto listener = ListenWithin("tcp://127.0.0.1:0", &service_, limits_, caps_);
    ASSERT_TRUE(listener.ok()) << listener.status();
    listener_ = *std::move(listener);
    address_ = listener_->address();
  }
  // Somebody who knows the protocol is served.
  void ExpectServing() {
    auto channel = *Dial(address_, limits_);
    const auto reply = channel->Call(kUnary, "hello", kHangMs);
    ASSERT_TRUE(reply.ok()) << reply.status();
    RecordingSink sink;
    auto stream = *channel->Open(kStream, &sink);
    ASSERT_TRUE(stream->Send(TextMessage("x", std::string(100000, 'f'))).ok());
    EXPECT_TRUE(sink.WaitForCount(1));
    stream.reset();
  }
  // What the sinks of streams were closed with.
  void RecordEnds() {
    service_.on_accept = [this](Method, std::shared_ptr<Stream> stream) -> absl::StatusOr<std::unique_ptr<StreamSink>> {
      return std::make_unique<RecordingSink>([stream](Message m) { (void)stream->Send(std::move(m)); },
                                             [this](absl::Status status) {
                                               absl::MutexLock lock(&mu_);
                                               // A copy of its own: what it shares with the transport is counted
                                               // where ThreadSanitizer does not see it.
                                               ends_.emplace_back(status.code(), std::string(status.message()));
                                             });
    };
  }
  absl::Status WaitForEnd() {
    absl::MutexLock lock(&mu_);
    const auto ended = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !ends_.empty(); };
    if (!mu_.AwaitWithTimeout(absl::Condition(&ended), HangBound())) return absl::DataLossError("hang: no OnClosed");
    return ends_.back();
  }

  absl::Mutex mu_;
  std::vector<absl::Status> ends_ ABSL_GUARDED_BY(mu_);
  Limits limits_;
  Caps caps_;
  TestService service_;
  std::unique_ptr<Listener> listener_;
  std::string address_;
};

TEST_F(TcpAttackTest, GarbageIsHungUpOn) {
  Start();
  std::minstd_rand random(1);
  for (int i = 0; i < 200; ++i) {
    std::string garbage(random() % 5000 + 2, '\0');
    for (char& c : garbage) c = static_cast<char>(random() >> 8);
    RawPeer peer(address_);
    peer.Send(garbage);
    EXPECT_EQ(peer.Read(), "") << "seed 1, attempt " << i;
  }
  ExpectServing();
}

TEST_F(TcpAttackTest, HttpIsHungUpOn) {
  Start();
  RawPeer peer(address_);
  peer.Send("GET / HTTP/1.1\r\nHost: shard\r\n\r\n");
  EXPECT_EQ(peer.Read(), "");
  ExpectServing();
}

TEST_F(TcpAttackTest, AGrpcClientIsToldWhatItDialled) {
  Start();
  auto channel = *Dial(absl::StrCat("grpc", address_.substr(3)), limits_);
  const auto reply = channel->Call(kUnary, "hello", 2000);
  EXPECT_FALSE(reply.ok());
  RawPeer peer(address_);
  peer.Send(std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") + std::string("\0\0\0\4\0\0\0\0\0", 9));
  const std::string answer = peer.Read();
  EXPECT_THAT(answer, StartsWith(std::string("\0\0\0\4\0\0\0\0\0", 9)));  // SETTINGS, as HTTP/2 wants it first
  EXPECT_THAT(answer, HasSubstr("dial tcp://host:port"));
  ExpectServing();
}

TEST_F(TcpAttackTest, AClientThatDialsAGrpcServerIsToldSo) {
  auto listener = *Listen("grpc://127.0.0.1:0", &service_, limits_);
  auto channel = *Dial(absl::StrCat("tcp", listener->address().substr(4)), limits_);
  const auto reply = channel->Call(kUnary, "hello", kHangMs);
  EXPECT_TRUE(absl::IsFailedPrecondition(reply.status())) << reply.status();
  EXPECT_THAT(std::string(reply.status().message()), HasSubstr("gRPC server"));
  RecordingSink sink;
  auto stream = *channel->Open(kStream, &sink);
  EXPECT_THAT(std::string(sink.Wait().message()), HasSubstr("gRPC server"));
}

TEST_F(TcpAttackTest, OtherVersionsAreToldOurs) {
  Start();
  std::string preface = Preface();
  preface[8] = preface[10] = 7;
  RawPeer peer(address_);
  peer.Send(preface + PacketBytes(PacketType::kCall, std::string(kUnary), "x"));
  EXPECT_EQ(peer.Read(), Preface());
  ExpectServing();
}

TEST_F(TcpAttackTest, AServerOfAnotherVersionIsNamed) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(name);
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&name), size), 0);
  ASSERT_EQ(listen(fd, 4), 0);
  ASSERT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&name), &size), 0);
  std::thread server([fd] {
    for (int i = 0; i < 2; ++i) {
      RawPeer peer(accept(fd, nullptr, nullptr));
      std::string preface = Preface();
      preface[8] = preface[10] = 7;
      const uint32_t crc = Crc32c({reinterpret_cast<const uint8_t*>(preface.data()), 12});
      std::memcpy(preface.data() + 12, &crc, sizeof(crc));
      peer.Send(preface);
      peer.Read();
    }
  });
  auto channel = *Dial(absl::StrCat("tcp://127.0.0.1:", ntohs(name.sin_port)), limits_);
  const auto reply = channel->Call(kUnary, "hello", kHangMs);
  EXPECT_TRUE(absl::IsFailedPrecondition(reply.status())) << reply.status();
  EXPECT_THAT(std::string(reply.status().message()), HasSubstr("versions 7 to 7"));
  RecordingSink sink;
  auto stream = *channel->Open(kStream, &sink);
  EXPECT_TRUE(absl::IsFailedPrecondition(sink.Wait())) << sink.Wait();
  channel.reset();
  server.join();
  close(fd);
}

TEST_F(TcpAttackTest, FlippedBitsOfAHeaderEndTheStream) {
  RecordEnds();
  Start();
  const std::string message = PacketBytes(PacketType::kMessage, "c", std::string(1000, 'b'));
  for (size_t bit = 0; bit < 8 * tcp::kHeaderBytes; bit += 5) {
    std::string bad = message;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << (bit % 8)));
    RawPeer peer(address_);
    peer.Send(OpenBytes() + bad);
    peer.ExpectStatus(absl::StatusCode::kDataLoss);
  }
  EXPECT_TRUE(absl::IsDataLoss(WaitForEnd()));
  ExpectServing();
}

TEST_F(TcpAttackTest, LengthsBeyondTheLimitAreRefusedByTheHeader) {
  Start();
  for (size_t bytes : {limits_.max_message_bytes + 1, size_t{UINT32_MAX}}) {
    RawPeer stream(address_);
    stream.Send(OpenBytes() + HeaderBytes(PacketType::kMessage, 0, bytes));
    stream.ExpectStatus(absl::StatusCode::kResourceExhausted);
    RawPeer call(address_);
    call.Send(Preface() + HeaderBytes(PacketType::kCall, kUnary.size(), bytes));
    call.ExpectStatus(absl::StatusCode::kResourceExhausted);
  }
  ExpectServing();
}

TEST_F(TcpAttackTest, TruncatedMessagesCancelTheStream) {
  RecordEnds();
  Start();
  const std::string message = PacketBytes(PacketType::kMessage, "c", std::string(2 * kMiB, 'b'));
  for (size_t bytes : {size_t{1}, size_t{15}, size_t{16}, size_t{17}, size_t{5000}, kMiB, message.size() - 1}) {
    {
      RawPeer peer(address_);
      peer.Send(OpenBytes() + message.substr(0, bytes));
    }
    EXPECT_TRUE(absl::IsCancelled(WaitForEnd())) << bytes;
    absl::MutexLock lock(&mu_);
    ends_.clear();
  }
  ExpectServing();
}

TEST_F(TcpAttackTest, PacketsOutOfPlaceAreRefused) {
  Start();
  const std::string open = PacketBytes(PacketType::kOpen, std::string(kStream));
  const std::string call = PacketBytes(PacketType::kCall, std::string(kUnary), "x");
  for (const std::string& packets : {
           PacketBytes(PacketType::kMessage, "c", "b"),
           PacketBytes(PacketType::kHalfClose),
           PacketBytes(PacketType::kAlive),
           PacketBytes(PacketType::kReply, "", "b"),
           PacketBytes(PacketType::kStatus),
           open + open,
           open + call,
           open + PacketBytes(PacketType::kReply, "", "b"),
           open + PacketBytes(PacketType::kStatus),
           call + open,
           call + PacketBytes(PacketType::kMessage, "c", "b"),
       }) {
    RawPeer peer(address_);
    peer.Send(Preface() + packets);
    peer.ExpectStatus(absl::StatusCode::kInvalidArgument);
  }
  ExpectServing();
}

TEST_F(TcpAttackTest, TheSilentAndTheSlowAreDropped) {
  limits_.keepalive_ms = 100;
  Start();
  RawPeer silent(address_);
  RawPeer half(address_);
  half.Send(Preface().substr(0, 5));
  RawPeer greeted(address_);
  greeted.Send(Preface());
  EXPECT_EQ(silent.Read(), "");
  EXPECT_EQ(half.Read(), "");
  EXPECT_EQ(greeted.Read(), Preface());
  // One byte now and then does not help.
  RawPeer slow(address_);
  slow.Send(Preface() + HeaderBytes(PacketType::kCall, 65000, 0));
  const absl::Time bound = absl::Now() + HangBound();
  while (slow.Send("x") && absl::Now() < bound) std::this_thread::yield();
  EXPECT_LT(absl::Now(), bound);
  ExpectServing();
}

TEST_F(TcpAttackTest, HalfOpenStreamsAreNoticed) {
  limits_.keepalive_ms = 100;
  RecordEnds();
  Start();
  RawPeer peer(address_);
  peer.Send(OpenBytes());
  EXPECT_TRUE(absl::IsCancelled(WaitForEnd()));
  EXPECT_THAT(std::string(WaitForEnd().message()), HasSubstr("no sign of life"));
  // It was given signs of life itself.
  EXPECT_THAT(peer.Read(), HasSubstr(PacketBytes(PacketType::kAlive)));
}

TEST_F(TcpAttackTest, QuietAndBusyStreamsLive) {
  limits_.keepalive_ms = 250;
  Gate gate;
  service_.on_accept = [&](Method, std::shared_ptr<Stream> stream) -> absl::StatusOr<std::unique_ptr<StreamSink>> {
    return std::make_unique<RecordingSink>([&gate, stream](Message m) {
      gate.Pass();
      (void)stream->Send(std::move(m));
    });
  };
  Start();
  auto channel = *Dial(address_, limits_);
  RecordingSink sink;
  auto stream = *channel->Open(kStream, &sink);
  // The server's sink is busy, and nobody says anything, for many keepalive times.
  ASSERT_TRUE(stream->Send(TextMessage("x")).ok());
  absl::SleepFor(absl::Milliseconds(1500));
  gate.Open();
  EXPECT_TRUE(sink.WaitForCount(1));
  absl::SleepFor(absl::Milliseconds(1500));
  ASSERT_TRUE(stream->Send(TextMessage("y")).ok());
  EXPECT_TRUE(sink.WaitForCount(2));
}

TEST_F(TcpAttackTest, ThousandsOfConnectionsComeAndGo) {
  Start();
  ExpectServing();
  const auto descriptors = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
  };
  const auto before = descriptors();
  for (int i = 0; i < 3000; ++i) {
    RawPeer peer(address_);
    if (i % 3 == 1) peer.Send(Preface());
    if (i % 3 == 2) peer.Send(OpenBytes() + PacketBytes(PacketType::kMessage, "c", "b").substr(0, 10));
  }
  ExpectServing();
  const absl::Time bound = absl::Now() + HangBound();
  while (descriptors() > before + 8 && absl::Now() < bound) absl::SleepFor(absl::Milliseconds(10));
  EXPECT_LE(descriptors(), before + 8);
}

TEST_F(TcpAttackTest, ACrowdThatSaysNothingDelaysOthersOnly) {
  limits_.keepalive_ms = 500;
  Start();
  std::vector<RawPeer> crowd;
  for (int i = 0; i < 1100; ++i) crowd.emplace_back(address_);
  ExpectServing();
}

TEST_F(TcpAttackTest, AFlippedBitOfAControlPartEndsTheStreamAndTheCall) {
  RecordEnds();
  Start();
  std::string bad = PacketBytes(PacketType::kMessage, "control", std::string(1000, 'b'));
  bad[tcp::kHeaderBytes + 3] ^= 4;
  RawPeer stream(address_);
  stream.Send(OpenBytes() + bad);
  stream.ExpectStatus(absl::StatusCode::kDataLoss);
  EXPECT_TRUE(absl::IsDataLoss(WaitForEnd()));
  std::string call = PacketBytes(PacketType::kCall, std::string(kUnary), "request");
  call.back() ^= 1;
  RawPeer caller(address_);
  caller.Send(Preface() + call);
  caller.ExpectStatus(absl::StatusCode::kDataLoss);
  ExpectServing();
}

TEST_F(TcpAttackTest, IdleCallersMakeRoomAndStreamsDoNot) {
  caps_.max_connections = 20;
  Start();
  auto channel = *Dial(address_, limits_);
  RecordingSink sink;
  auto stream = *channel->Open(kStream, &sink);
  ASSERT_TRUE(stream->Send(TextMessage("x")).ok());
  ASSERT_TRUE(sink.WaitForCount(1));
  std::vector<RawPeer> idle;
  for (int i = 0; i < 60; ++i) {
    idle.emplace_back(address_);
    idle.back().Send(Preface() + PacketBytes(PacketType::kCall, std::string(kUnary), "one call"));
    EXPECT_NE(idle.back().Read(tcp::kPrefaceBytes + tcp::kHeaderBytes), "") << i;
  }
  ExpectServing();
  ASSERT_TRUE(stream->Send(TextMessage("y")).ok());
  EXPECT_TRUE(sink.WaitForCount(2)) << "the stream was in use";
  stream.reset();
}

TEST_F(TcpAttackTest, StreamsBeyondTheCapAreRefusedAndTold) {
  caps_.max_streams = 3;
  std::atomic<int> warned = 0;
  caps_.warn = [&](const std::string& what) { warned += absl::StrContains(what, "--max-streams") ? 1 : 0; };
  Start();
  std::vector<RawPeer> crowd;
  for (int i = 0; i < 3; ++i) {
    crowd.emplace_back(address_);
    crowd.back().Send(OpenBytes() + PacketBytes(PacketType::kMessage, "c", "b"));
    EXPECT_NE(crowd.back().Read(tcp::kPrefaceBytes + tcp::kHeaderBytes), "");
  }
  RawPeer one_more(address_);
  one_more.Send(OpenBytes());
  one_more.ExpectStatus(absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Warnings(warned), 1);
  crowd.clear();
  const absl::Time bound = absl::Now() + HangBound();
  for (bool served = false; !served && absl::Now() < bound;) {
    RecordingSink sink;
    auto channel = *Dial(address_, limits_);
    auto stream = *channel->Open(kStream, &sink);
    served = stream->Send(TextMessage("x")).ok() && (sink.WaitForCount(1) || sink.closed()) && sink.count() > 0;
    stream.reset();
  }
  ExpectServing();
}

TEST_F(TcpAttackTest, HalfSentMessagesTakeNoMoreThanTheirShare) {
  caps_.receive_bytes = 16 * kMiB;
  std::atomic<int> warned = 0;
  caps_.warn = [&](const std::string& what) { warned += absl::StrContains(what, "--receive-limit-bytes") ? 1 : 0; };
  Start();
  const std::string half = PacketBytes(PacketType::kMessage, "c", std::string(7 * kMiB, 'b')).substr(0, 4 * kMiB);
  std::vector<RawPeer> crowd;
  for (int i = 0; i < 20; ++i) {
    crowd.emplace_back(address_);
    crowd.back().Send(OpenBytes());
    crowd.back().Send(half);
  }
  // Those that began first were dropped: the first four of twenty have heard the end.
  for (int i = 0; i < 4; ++i) EXPECT_NE(crowd[i].Read(), "no end") << i;
  EXPECT_GE(Warnings(warned), 1);
  ExpectServing();
}

TEST_F(TcpAttackTest, ACallerThatTakesNoReplyIsGivenNoFurtherOne) {
  limits_.send_window_bytes = 256 * kMiB;
  std::atomic<size_t> answered = 0;
  service_.on_call = [&](Method, std::string_view request) -> absl::StatusOr<std::string> {
    if (request != "much") return std::string(request);
    ++answered;
    return std::string(kMiB, 'r');
  };
  Start();
  constexpr size_t kCalls = 128;
  RawPeer peer(address_);
  peer.Send(Preface());
  for (size_t i = 0; i < kCalls; ++i) peer.Send(PacketBytes(PacketType::kCall, std::string(kUnary), "much"));
  for (size_t seen = SIZE_MAX; seen != answered;) {
    seen = answered;
    absl::SleepFor(absl::Milliseconds(300));
  }
  EXPECT_LE(answered * kMiB, 49 * kMiB);  // one, and what the kernel holds
  ExpectServing();
  const size_t reply_bytes = tcp::kHeaderBytes + kMiB;
  EXPECT_EQ(peer.Read(Preface().size() + kCalls * reply_bytes).size(), Preface().size() + kCalls * reply_bytes);
  EXPECT_EQ(answered, kCalls) << "who takes them late gets them all";
}

TEST_F(TcpAttackTest, ACallerThatTakesNoReplyIsCutOff) {
  limits_.keepalive_ms = 100;
  service_.on_call = [](Method, std::string_view request) -> absl::StatusOr<std::string> {
    return request == "much" ? std::string(kMiB, 'r') : std::string(request);
  };
  Start();
  RawPeer peer(address_);
  peer.Send(Preface());
  const absl::Time bound = absl::Now() + absl::Milliseconds(kHangMs);
  // Once nobody reads them any more, calls cannot be sent.
  while (peer.Send(PacketBytes(PacketType::kCall, std::string(kUnary), "much")) && absl::Now() < bound)
    absl::SleepFor(absl::Milliseconds(1));
  EXPECT_LT(absl::Now(), bound) << "hang: the connection stays";
  ExpectServing();
}

TEST_F(TcpAttackTest, APeerThatDoesNotReadHoldsNothingUp) {
  limits_.send_window_bytes = kMiB;
  std::atomic<size_t> sent = 0;
  std::thread sender;
  service_.on_accept = [&](Method method,
                           std::shared_ptr<Stream> stream) -> absl::StatusOr<std::unique_ptr<StreamSink>> {
    if (method == kStream && !sender.joinable()) {
      sender = std::thread([&sent, stream] {
        while (stream->Send(TextMessage("x", std::string(kMiB, 'b'))).ok()) ++sent;
      });
    }
    return std::make_unique<RecordingSink>([stream](Message m) { (void)stream->Send(std::move(m)); });
  };
  Start();
  RawPeer peer(address_);
  peer.Send(OpenBytes());
  for (size_t seen = SIZE_MAX; seen != sent;) {
    seen = sent;
    absl::SleepFor(absl::Milliseconds(300));
  }
  EXPECT_LE(sent * kMiB, 49 * kMiB);  // the window, and what the kernel holds
  ExpectServing();
  listener_.reset();  // does not wait for the peer
  sender.join();
}

}  // namespace
}  // namespace gradwire::transport

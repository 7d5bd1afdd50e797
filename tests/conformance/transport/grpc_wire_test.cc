// What the gRPC transport looks like to others: protobuf bytes on the wire both ways, malformed bytes refused, health
// and reflection there.
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "common/transport/transport.h"
#include "gradwire/v1/worker.pb.h"
#include "tests/conformance/transport/testing.h"

namespace gradwire::transport {
namespace {

using namespace testing;  // NOLINT: tests/conformance/transport/testing.h

// A client that knows nothing of Gradwire's transport.
class RawClient {
 public:
  explicit RawClient(const std::string& address)
      : stub_(::grpc::CreateChannel(address.substr(address.find("://") + 3), ::grpc::InsecureChannelCredentials())) {}

  // Sends the messages on one stream, half-closes, returns what came back.
  ::grpc::Status Exchange(Method method, const std::vector<std::vector<std::string>>& messages,
                          std::vector<std::string>* replies) {
    ::grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    auto call = stub_.PrepareCall(&context, std::string("/").append(method), &queue_);
    call->StartCall(this);
    Next();
    for (const auto& parts : messages) {
      std::vector<::grpc::Slice> slices;
      for (const auto& part : parts) slices.emplace_back(part);
      call->Write(::grpc::ByteBuffer(slices.data(), slices.size()), this);
      if (!Next()) break;
    }
    call->WritesDone(this);
    Next();
    while (true) {
      ::grpc::ByteBuffer reply;
      call->Read(&reply, this);
      if (!Next()) break;
      std::vector<::grpc::Slice> slices;
      (void)reply.Dump(&slices);
      replies->emplace_back();
      for (const auto& s : slices) replies->back().append(reinterpret_cast<const char*>(s.begin()), s.size());
    }
    ::grpc::Status status;
    call->Finish(&status, this);
    Next();
    return status;
  }

  ~RawClient() {
    queue_.Shutdown();
    while (Next()) {
    }
  }

 private:
  bool Next() {
    void* tag = nullptr;
    bool ok = false;
    return queue_.Next(&tag, &ok) && ok;
  }
  ::grpc::GenericStub stub_;
  ::grpc::CompletionQueue queue_;
};

class GrpcWireTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto listener = Listen("grpc://127.0.0.1:0", &service_);
    ASSERT_TRUE(listener.ok()) << listener.status();
    listener_ = *std::move(listener);
    client_ = std::make_unique<RawClient>(listener_->address());
  }
  TestService service_;
  std::unique_ptr<Listener> listener_;
  std::unique_ptr<RawClient> client_;
};

TEST_F(GrpcWireTest, StreamMessagesAreProtobuf) {
  v1::PushMessage message;
  message.mutable_open()->set_job("j");
  message.mutable_open()->set_incarnation(7);
  message.set_frame(std::string(100000, 'f'));
  std::vector<std::string> replies;
  // Echoed through Message and back.
  const ::grpc::Status status = client_->Exchange(kStream, {{message.SerializeAsString()}}, &replies);
  EXPECT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(replies.size(), 1u);
  v1::PushMessage echoed;
  ASSERT_TRUE(echoed.ParseFromString(replies[0]));
  EXPECT_EQ(echoed.SerializeAsString(), message.SerializeAsString());
}

TEST_F(GrpcWireTest, FrameHeaderMayBeSplitAcrossSlices) {
  v1::PushMessage message;
  message.mutable_open()->set_job("job");
  message.set_frame(std::string(300, 'f'));
  const std::string bytes = message.SerializeAsString();
  for (size_t cut = 0; cut <= 20; ++cut) {
    std::vector<std::string> replies;
    EXPECT_TRUE(client_->Exchange(kStream, {{bytes.substr(0, cut), "", bytes.substr(cut)}}, &replies).ok());
    ASSERT_EQ(replies.size(), 1u);
    EXPECT_EQ(replies[0], bytes);
  }
}

TEST_F(GrpcWireTest, MalformedBytesEndTheStreamAndNothingElse) {
  const std::vector<std::string> bad = {
      std::string("\x00", 1),  // field 0
      std::string("\x0A\x05"
                  "ab",
                  4),  // a string longer than the message
      std::string("\x7A\x05"
                  "abcdef",
                  8),  // bytes behind the frame
      std::string("\x7A\x05"
                  "abc",
                  5),           // a frame cut short
      std::string("\x7A", 1),   // a frame without its length
      std::string("\x0B", 1),   // a group
      std::string("\x0F", 1),   // wire type 7
      std::string(11, '\xFF'),  // a varint without end
      std::string("\x09"
                  "abc",
                  4),                                                   // 64 bits cut short
      std::string("\x0A\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x01", 11),  // length 2^64-1
  };
  for (size_t i = 0; i < bad.size(); ++i) {
    std::vector<std::string> replies;
    const ::grpc::Status status = client_->Exchange(kStream, {{TextMessage("ok").control}, {bad[i]}}, &replies);
    EXPECT_EQ(status.error_code(), ::grpc::StatusCode::INVALID_ARGUMENT)
        << "case " << i << ": " << status.error_message();
  }
  std::vector<std::string> replies;
  EXPECT_TRUE(client_->Exchange(kStream, {{TextMessage("fine").control}}, &replies).ok());
  EXPECT_EQ(replies.size(), 1u);
}

// As a call arrives whose metadata were damaged, or come from a damaged table of its connection: nothing else would
// notice what becomes of its messages.
TEST_F(GrpcWireTest, MessagesWithACheckAreRefusedWhereTheirCallDoesNotSaySo) {
  std::atomic<int> served = 0;
  service_.on_call = [&](Method, std::string_view request) -> absl::StatusOr<std::string> {
    ++served;
    return std::string(request);
  };
  const std::string check(
      "\xFD\x7F"
      "crc?",
      6);
  std::vector<std::string> replies;
  const std::string control = TextMessage("message").control;
  EXPECT_EQ(client_->Exchange(kUnary, {{control + check}}, &replies).error_code(), ::grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(served, 0);
  EXPECT_EQ(client_->Exchange(kStream, {{control + check}}, &replies).error_code(), ::grpc::StatusCode::DATA_LOSS);
  EXPECT_TRUE(replies.empty());
  EXPECT_TRUE(client_->Exchange(kUnary, {{control}}, &replies).ok());
  EXPECT_EQ(served, 1);
}

TEST_F(GrpcWireTest, HealthFollowsSetServing) {
  const auto check = [&](const std::string& service) {
    std::string request;
    if (!service.empty()) request = "\x0A" + std::string(1, static_cast<char>(service.size())) + service;
    std::vector<std::string> replies;
    const ::grpc::Status status = client_->Exchange("grpc.health.v1.Health/Check", {{request}}, &replies);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return replies.empty() ? std::string() : replies[0];
  };
  for (const char* service : {"", "gradwire.v1.Worker", "gradwire.v1.Operator"}) {
    listener_->SetServing(true);
    EXPECT_EQ(check(service), "\x08\x01") << service;
    listener_->SetServing(false);
    EXPECT_EQ(check(service), "\x08\x02") << service;
  }
}

// A call of grpc.health.v1.Health/Watch that is read only when Next is called.
class Watcher {
 public:
  explicit Watcher(const std::string& address)
      : stub_(::grpc::CreateCustomChannel(address.substr(address.find("://") + 3), ::grpc::InsecureChannelCredentials(),
                                          OwnConnection())) {
    context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(120));
    call_ = stub_.PrepareCall(&context_, "/grpc.health.v1.Health/Watch", &queue_);
    call_->StartCall(nullptr);
    EXPECT_TRUE(Done());
    const ::grpc::Slice nothing(std::string{});
    call_->Write(::grpc::ByteBuffer(&nothing, 1), nullptr);
    EXPECT_TRUE(Done());
    call_->WritesDone(nullptr);
    EXPECT_TRUE(Done());
  }
  ~Watcher() {
    Cancel();
    ::grpc::Status status;
    call_->Finish(&status, nullptr);
    EXPECT_TRUE(Done());
    EXPECT_FALSE(status.ok());
    queue_.Shutdown();
    while (Done()) {
    }
  }
  // What it is told next; empty at the end.
  std::string Next() {
    ::grpc::ByteBuffer reply;
    call_->Read(&reply, nullptr);
    ::grpc::Slice slice;
    if (!Done() || !reply.DumpToSingleSlice(&slice).ok()) return "";
    return {reinterpret_cast<const char*>(slice.begin()), slice.size()};
  }
  void Cancel() { context_.TryCancel(); }

 private:
  static ::grpc::ChannelArguments OwnConnection() {
    ::grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);  // its window does not grow
    return arguments;
  }
  bool Done() {
    void* tag = nullptr;
    bool ok = false;
    return queue_.Next(&tag, &ok) && ok;
  }

  ::grpc::ClientContext context_;
  ::grpc::CompletionQueue queue_;
  ::grpc::GenericStub stub_;
  std::unique_ptr<::grpc::GenericClientAsyncReaderWriter> call_;
};

TEST_F(GrpcWireTest, HealthWatchTellsChanges) {
  Watcher watcher(listener_->address());
  for (const char* want : {"\x08\x01", "\x08\x02", "\x08\x01"}) {
    EXPECT_EQ(watcher.Next(), want);
    listener_->SetServing(want[1] == 2);
  }
}

TEST_F(GrpcWireTest, AWatcherThatDoesNotReadHoldsUpNobody) {
  constexpr int kChanges = 40'000;  // 7 bytes each on the wire, of a window of 64 KiB
  Limits limits;
  limits.send_window_bytes = 1024;
  const auto listener = *Listen("grpc://127.0.0.1:0", &service_, limits);
  Watcher deaf(listener->address()), other(listener->address());
  ASSERT_EQ(deaf.Next(), "\x08\x01");
  ASSERT_EQ(other.Next(), "\x08\x01");
  absl::Notification changed;
  std::thread changer([&] {
    for (int i = 0; i < kChanges; ++i) listener->SetServing(i % 2 != 0);
    changed.Notify();
  });
  std::thread reader([&] {
    for (int i = 0; i < kChanges; ++i) {
      if (other.Next() == (i % 2 != 0 ? "\x08\x01" : "\x08\x02")) continue;
      ADD_FAILURE() << "the other watcher was not told of change " << i;
      return;
    }
  });
  const bool in_time = changed.WaitForNotificationWithTimeout(HangBound());
  EXPECT_TRUE(in_time) << "whoever says that this server serves waits for a watcher";
  if (!in_time) deaf.Cancel();
  changer.join();
  reader.join();
}

TEST_F(GrpcWireTest, ReflectionListsTheServicesAndTheirFiles) {
  for (const char* version : {"v1", "v1alpha"}) {
    std::vector<std::string> replies;
    const std::string list_services("\x3A\x00", 2);
    const std::string symbol = "gradwire.v1.Worker";
    const std::string by_symbol = "\x22" + std::string(1, static_cast<char>(symbol.size())) + symbol;
    const std::string unknown = "\x22\x03xyz";
    const std::string method = std::string("grpc.reflection.") + version + ".ServerReflection/ServerReflectionInfo";
    const ::grpc::Status status = client_->Exchange(method, {{list_services}, {by_symbol}, {unknown}}, &replies);
    EXPECT_TRUE(status.ok()) << status.error_message();
    ASSERT_EQ(replies.size(), 3u);
    EXPECT_THAT(replies[0], ::testing::HasSubstr("gradwire.v1.Worker"));
    EXPECT_THAT(replies[0], ::testing::HasSubstr("gradwire.v1.Operator"));
    EXPECT_THAT(replies[1], ::testing::HasSubstr("gradwire/v1/worker.proto"));
    EXPECT_THAT(replies[1], ::testing::HasSubstr("gradwire/v1/job.proto"));
    EXPECT_THAT(replies[2], ::testing::HasSubstr("no such file or symbol"));
  }
}

}  // namespace
}  // namespace gradwire::transport

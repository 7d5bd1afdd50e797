// Memory that runs out costs the call or the stream that asked for it. The clock fails in its place: every request
// reads it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <new>
#include <optional>

#include "server/job/job_registry.h"
#include "server/services/dispatcher.h"
#include "tests/unit/server/frame_maker.h"
#include "tests/unit/server/recording_stream.h"
#include "tests/unit/server/small_environment.h"

namespace gradwire {
namespace {

using testing::HasSubstr;
using testing_support::FrameMaker;
using testing_support::RecordingStream;
using testing_support::SmallSpec;

class ExhaustedClock final : public Clock {
 public:
  TimeNs Now() override {
    if (exhausted) throw std::bad_alloc();
    return 1;
  }
  bool exhausted = false;
};

// Takes initial parameters, then runs out of memory.
class ExhaustedSink final : public UpdateSink {
 public:
  void Append(journal::Record record, std::function<void()> visible) override {
    if (record.type == journal::RecordType::kUpdate) throw std::bad_alloc();
    visible();
  }
  void Stop() override {}
  journal::JournalStatus status() const override { return {}; }
  void SnapshotTaken(uint64_t, uint64_t) override {}
};

class ServicesTest : public testing::Test {
 protected:
  ServicesTest()
      : spec_(SmallSpec("job", 1)),
        backend_(std::move(*kernels::MakeBackend("cpu"))),
        registry_(testing_support::SmallEnvironment(backend_.get(), &clock_), {.memory_bytes = 1 << 28, .max_jobs = 4}),
        replication_({}, &registry_, nullptr, &clock_),
        worker_(&registry_, &replication_),
        operator_(&registry_, &replication_),
        standbys_(&replication_),
        peers_(&registry_),
        dispatcher_(&worker_, &operator_, &standbys_, &peers_, &replication_),
        frames_(spec_, 0, 1, 7),
        identity_(testing_support::IdentityOf("job", "a", 7)) {}
  absl::Status Join() {
    v1::JoinRequest request;
    *request.mutable_identity() = identity_;
    *request.mutable_spec() = spec_;
    request.set_shard_count(1);
    request.set_may_initialize(true);
    return dispatcher_.Call("gradwire.v1.Worker/Join", request.SerializeAsString()).status();
  }
  absl::Status Heartbeat() {
    v1::HeartbeatRequest request;
    *request.mutable_identity() = identity_;
    return dispatcher_.Call("gradwire.v1.Worker/Heartbeat", request.SerializeAsString()).status();
  }
  // Opens a stream as this worker.
  std::unique_ptr<transport::StreamSink> Open(const std::shared_ptr<RecordingStream>& stream) {
    auto sink = dispatcher_.Accept("gradwire.v1.Worker/Push", stream);
    EXPECT_TRUE(sink.ok()) << sink.status();
    v1::PushMessage open;
    *open.mutable_open() = identity_;
    (*sink)->OnMessage({open.SerializeAsString(), {}});
    return *std::move(sink);
  }

  const v1::JobSpec spec_;
  ExhaustedClock clock_;
  std::unique_ptr<kernels::Backend> backend_;
  JobRegistry registry_;
  Replication replication_;
  WorkerService worker_;
  OperatorService operator_;
  ReplicationService standbys_;
  PeerService peers_;
  Dispatcher dispatcher_;
  FrameMaker frames_;
  const v1::WorkerIdentity identity_;
};

TEST_F(ServicesTest, ACallWithoutMemoryIsToldAndTheNextOneWorks) {
  ASSERT_EQ(Join(), absl::OkStatus());
  clock_.exhausted = true;
  const absl::Status status = Heartbeat();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("gradwire.v1.Worker/Heartbeat: out of memory"));
  clock_.exhausted = false;
  EXPECT_EQ(Heartbeat(), absl::OkStatus());
}

TEST_F(ServicesTest, AStreamWithoutMemoryEndsAndTheNextOneWorks) {
  ASSERT_EQ(Join(), absl::OkStatus());
  auto stream = std::make_shared<RecordingStream>();
  auto sink = Open(stream);
  // The warning about it reads the clock as well.
  clock_.exhausted = true;
  sink->OnMessage({std::string(), {frames_.Initialize(0, 1.0f)[0]}});
  ASSERT_TRUE(stream->finished.has_value());
  EXPECT_EQ(stream->finished->code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(stream->sent.empty());
  clock_.exhausted = false;
  sink->OnClosed(absl::OkStatus());

  auto again = std::make_shared<RecordingStream>();
  sink = Open(again);
  for (uint32_t b = 0; b < frames_.buckets(); ++b) sink->OnMessage({std::string(), {frames_.Initialize(b, 1.0f)[0]}});
  EXPECT_EQ(again->sent.size(), frames_.buckets());
  EXPECT_FALSE(again->finished.has_value());
  sink->OnClosed(absl::OkStatus());
}

TEST_F(ServicesTest, ABucketStopsWhenTheJournalHasNoMemory) {
  ASSERT_EQ(Join(), absl::OkStatus());
  (*registry_.Find("job"))->log().SetSink(std::make_unique<ExhaustedSink>());
  auto stream = std::make_shared<RecordingStream>();
  auto sink = Open(stream);
  for (uint32_t b = 0; b < frames_.buckets(); ++b) sink->OnMessage({std::string(), {frames_.Initialize(b, 1.0f)[0]}});
  for (uint32_t b = 0; b < frames_.buckets(); ++b) sink->OnMessage({std::string(), {frames_.Push(b, 0, 1.0f)[0]}});
  EXPECT_FALSE(stream->finished.has_value());
  EXPECT_EQ((*registry_.Find("job"))->Describe(false, false).version(), 0u);
  auto pulling = std::make_shared<RecordingStream>();
  auto pull = dispatcher_.Accept("gradwire.v1.Worker/Pull", pulling);
  v1::PullRequest request;
  *request.mutable_open() = identity_;
  request.set_kind(v1::PULL_UPDATE);
  request.set_version(1);
  request.set_bucket_end(1);
  (*pull)->OnMessage({request.SerializeAsString(), {}});
  v1::PullMessage answer;
  ASSERT_EQ(pulling->sent.size(), 1u);
  ASSERT_TRUE(answer.ParseFromString(pulling->sent[0].control));
  EXPECT_EQ(answer.code(), static_cast<int>(absl::StatusCode::kResourceExhausted));
  (*pull)->OnClosed(absl::OkStatus());
  sink->OnClosed(absl::OkStatus());
}

}  // namespace
}  // namespace gradwire

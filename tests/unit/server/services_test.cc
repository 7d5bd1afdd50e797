// Memory that runs out costs the call or the stream that asked for it. The clock fails in its place: every request
// reads it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <new>
#include <optional>
#include <set>

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
  absl::Status RecordTrace(const std::string& job, uint64_t first_round, uint64_t rounds) {
    v1::RecordTraceRequest request;
    request.set_job(job);
    request.set_first_round(first_round);
    request.set_rounds(rounds);
    return dispatcher_.Call("gradwire.v1.Operator/RecordTrace", request.SerializeAsString()).status();
  }
  v1::TracePage ReadTrace(uint64_t from, uint32_t limit) {
    v1::ReadTraceRequest request;
    request.set_job("job");
    request.set_from(from);
    request.set_limit(limit);
    const auto answer = dispatcher_.Call("gradwire.v1.Operator/ReadTrace", request.SerializeAsString());
    EXPECT_EQ(answer.status(), absl::OkStatus());
    v1::TracePage page;
    EXPECT_TRUE(answer.ok() && page.ParseFromString(*answer));
    return page;
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

TEST_F(ServicesTest, ATraceHasWhatBecameOfEveryBucket) {
  ASSERT_EQ(Join(), absl::OkStatus());
  ASSERT_EQ(RecordTrace("job", 0, 1), absl::OkStatus());
  auto stream = std::make_shared<RecordingStream>();
  auto sink = Open(stream);
  v1::PushMessage wants_update;
  wants_update.add_pull(v1::PULL_UPDATE);
  for (uint32_t b = 0; b < frames_.buckets(); ++b) sink->OnMessage({std::string(), {frames_.Initialize(b, 1.0f)[0]}});
  for (uint64_t round : {uint64_t{0}, uint64_t{1}})
    for (uint32_t b = 0; b < frames_.buckets(); ++b)
      sink->OnMessage({wants_update.SerializeAsString(), {frames_.Push(b, round, 1.0f)[0]}});
  const v1::TracePage page = ReadTrace(0, 4096);
  ASSERT_EQ(page.members_size(), 1);
  EXPECT_EQ(page.members(0).worker(), "a");
  EXPECT_EQ(page.clock_ns(), clock_.Now());
  std::map<v1::TraceStage, std::set<uint32_t>> buckets;
  for (const v1::TraceEvent& event : page.events()) {
    EXPECT_EQ(event.round(), 0u);
    EXPECT_LE(event.begin_ns(), event.end_ns());
    buckets[event.stage()].insert(event.bucket());
    if (event.stage() != v1::TRACE_MERGE && event.stage() != v1::TRACE_ANSWER) continue;
    EXPECT_EQ(event.member(), page.members(0).id());
    EXPECT_GT(event.bytes(), 0u);
  }
  for (v1::TraceStage stage : {v1::TRACE_MERGE, v1::TRACE_FINISH, v1::TRACE_RECORD, v1::TRACE_APPLY, v1::TRACE_ANSWER})
    EXPECT_EQ(buckets[stage].size(), frames_.buckets()) << v1::TraceStage_Name(stage);
  EXPECT_EQ(buckets.size(), 5u) << "stages that this job does not have";
  const v1::TracePage rest = ReadTrace(page.total() - 1, 4096);
  ASSERT_EQ(rest.events_size(), 1);
  EXPECT_EQ(rest.events(0).SerializeAsString(), page.events(page.events_size() - 1).SerializeAsString());
  EXPECT_EQ(ReadTrace(0, 0).events_size(), 0);
  sink->OnClosed(absl::OkStatus());
}

TEST_F(ServicesTest, ATraceIsBoundedAndCounted) {
  EXPECT_EQ(RecordTrace("job", 0, 1).code(), absl::StatusCode::kNotFound);
  ASSERT_EQ(Join(), absl::OkStatus());
  for (uint64_t rounds : {uint64_t{0}, uint64_t{1001}, UINT64_MAX})
    EXPECT_THAT(RecordTrace("job", 0, rounds).message(), HasSubstr("allowed are 1 to 1000"));
  const uint64_t before = registry_.environment().account->used();
  for (uint64_t first : {uint64_t{0}, uint64_t{7}, UINT64_MAX})
    EXPECT_EQ(RecordTrace("job", first, 5), absl::OkStatus());
  EXPECT_EQ(registry_.environment().account->used(), before + TraceRecorder::kMaxBytes);
  EXPECT_EQ(ReadTrace(0, 10).total(), 0u);
  ASSERT_EQ(registry_.Delete("job"), absl::OkStatus());
  EXPECT_EQ(registry_.environment().account->used(), 0u);
  MemoryAccount::Share others;
  ASSERT_EQ(Join(), absl::OkStatus());
  const auto& account = registry_.environment().account;
  ASSERT_TRUE(MemoryAccount::Resize(account, account->limit_bytes() - account->used(), &others));
  EXPECT_EQ(RecordTrace("job", 0, 1).code(), absl::StatusCode::kResourceExhausted);
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

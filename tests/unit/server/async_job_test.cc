// A job with asynchronous rounds without a transport: raw frames in, acknowledgements, parameters and records out; what
// comes back from a journal, a snapshot, and on a standby.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/codec/frame/parameters.h"
#include "common/recovery/replay.h"
#include "server/job/job_shard.h"
#include "tests/lib/manual_clock.h"
#include "tests/unit/server/frame_maker.h"
#include "tests/unit/server/recording_stream.h"
#include "tests/unit/server/subject.h"

namespace gradwire {
namespace {

using testing::HasSubstr;
using testing_support::FrameMaker;
using testing_support::ManualClock;
using testing_support::RecordingStream;
using testing_support::SmallSpec;

// Keeps records, and what makes them seen until it is told to.
class KeepingSink final : public UpdateSink {
 public:
  explicit KeepingSink(std::vector<journal::Record>* records) : records_(*records) {}
  void Append(journal::Record record, std::function<void()> visible) override {
    records_.push_back(std::move(record));
    if (appended) std::exchange(appended, nullptr)();
    held.push_back(std::move(visible));
    if (!hold) Release();
  }
  void Stop() override {}
  journal::JournalStatus status() const override { return {}; }
  void SnapshotTaken(uint64_t, uint64_t from) override { keep_from = from; }
  void Release() {
    const std::vector<std::function<void()>> now = std::move(held);
    held.clear();
    for (const auto& visible : now) visible();
  }
  bool hold = false;
  uint64_t keep_from = 0;
  std::function<void()> appended;  // called once
  std::vector<std::function<void()>> held;

 private:
  std::vector<journal::Record>& records_;
};

// A worker: the frames it makes, its push stream, what came back.
struct RawWorker {
  RawWorker(JobShard* shard, const v1::JobSpec& spec, const std::string& name)
      : shard(shard), frames(spec, 0, 1, /*incarnation=*/1), received(std::make_shared<RecordingStream>()) {
    identity.set_job(spec.name());
    identity.set_worker(name);
    identity.set_incarnation(1);
  }
  void Attach() {
    out = std::make_shared<Outbox>(received);
    stream.member = *shard->Attach(identity, out);
    stream.incarnation = 1;
    stream.worker = identity.worker();
    stream.out = out;
  }
  void Join() {
    ASSERT_TRUE(shard->Join(identity, 0, true).ok());
    Attach();
  }
  // Nothing: the frame is not whole yet.
  std::optional<v1::PushAck> Chunk(const Bytes& chunk) {
    auto ack = shard->intake().Take(stream, {&chunk, 1});
    EXPECT_TRUE(ack.ok()) << ack.status();
    return ack.ok() ? *ack : std::nullopt;
  }
  v1::PushAck Push(const std::vector<Bytes>& chunks) {
    std::optional<v1::PushAck> ack;
    for (const Bytes& chunk : chunks) ack = Chunk(chunk);
    EXPECT_TRUE(ack.has_value());
    return ack.value_or(v1::PushAck());
  }
  v1::PushAck Push(uint32_t bucket, uint64_t on, float value) { return Push(frames.Push(bucket, on, value)); }
  void Ask(const v1::PushAck& ack) {
    const v1::PullKind kind = v1::PULL_PARAMS_F32;
    EXPECT_TRUE(shard->desk().AcknowledgeFrame(stream.member, ack, {&kind, 1}, out).ok());
  }
  // The versions of the parameters that were sent with acknowledgements since the last call, by bucket.
  std::map<uint32_t, uint64_t> TakeVersions() {
    std::map<uint32_t, uint64_t> versions;
    for (const transport::Message& message : received->sent) {
      v1::PushAck ack;
      EXPECT_TRUE(ack.ParseFromString(message.control));
      if (message.frame.empty()) continue;
      EXPECT_EQ(ack.kind(), v1::PULL_PARAMS_F32);
      versions[ack.bucket()] = wire::ParseHeader(wire::Flatten(message.frame).span())->round;
    }
    received->sent.clear();
    return versions;
  }

  JobShard* shard;
  FrameMaker frames;
  v1::WorkerIdentity identity;
  PushStream stream;
  std::shared_ptr<RecordingStream> received;
  std::shared_ptr<Outbox> out;
};

class AsyncJobTest : public testing::Test {
 protected:
  AsyncJobTest() {
    subject_->Set(&environment_);
    environment_.clock = &clock_;
    environment_.frame_limit_bytes = 16 << 20;
    environment_.job_memory_limit_bytes = 1 << 28;
    spec_ = SmallSpec("job", 3);
    spec_.mutable_rounds()->set_mode(v1::ROUNDS_ASYNC);
    spec_.mutable_rounds()->set_staleness(3);
  }
  std::shared_ptr<JobShard> Make() {
    auto shard = JobShard::Make(spec_, 0, 1, environment_);
    EXPECT_TRUE(shard.ok()) << shard.status();
    return *shard;
  }
  // Two workers of a job whose bucket 0 is at version 1.
  void Start() {
    shard_ = Make();
    auto sink = std::make_unique<KeepingSink>(&records_);
    sink_ = sink.get();
    shard_->log().SetSink(std::move(sink));
    for (const char* name : {"a", "b"}) {
      workers_.push_back(std::make_unique<RawWorker>(shard_.get(), spec_, name));
      workers_.back()->Join();
    }
    for (uint32_t b = 0; b < a().frames.buckets(); ++b) {
      for (const Bytes& chunk : a().frames.Initialize(b, 1.0f)) EXPECT_FALSE(a().Chunk(chunk).has_value());
    }
    a().received->sent.clear();  // the acknowledgements of these
    EXPECT_EQ(a().Push(0, 0, 1.0f).made(), 1u);
  }
  RawWorker& a() { return *workers_[0]; }
  RawWorker& b() { return *workers_[1]; }
  static std::string Digest(JobShard& shard) { return shard.Describe(false, true).parameters_sha256(); }
  static std::function<absl::Status(const Recovery::RecordVisitor&)> Read(const std::vector<journal::Record>& records) {
    return [&records](const Recovery::RecordVisitor& visit) {
      for (const journal::Record& record : records) {
        const absl::Status status = visit(record);
        if (!status.ok()) return status;
      }
      return absl::OkStatus();
    };
  }

  ManualClock clock_;
  const std::unique_ptr<testing_support::Subject> subject_ = testing_support::MakeSubject();
  JobEnvironment environment_;
  v1::JobSpec spec_;
  std::vector<journal::Record> records_;
  std::shared_ptr<JobShard> shard_;
  KeepingSink* sink_ = nullptr;
  std::vector<std::unique_ptr<RawWorker>> workers_;
};

TEST_F(AsyncJobTest, EveryFrameMakesAVersionAndIsAnsweredWithTheNewest) {
  Start();
  EXPECT_EQ(a().Push(0, 1, 2.0f).made(), 2u);
  const v1::PushAck ack = b().Push(0, 1, 4.0f);  // computed on the version before
  EXPECT_EQ(ack.outcome(), v1::PUSH_INCLUDED);
  EXPECT_EQ(ack.made(), 3u);
  a().Push(0, 2, 0.0f);
  b().Ask(ack);
  EXPECT_EQ(b().TakeVersions(), (std::map<uint32_t, uint64_t>{{0, 4}}));
  EXPECT_EQ(shard_->Describe(false, false).version(), 0u);  // the other bucket has not moved
}

TEST_F(AsyncJobTest, ParametersWaitUntilAllThatIsInThemMayBeSeen) {
  Start();
  sink_->hold = true;
  b().Ask(b().Push(0, 1, 1.0f));
  EXPECT_TRUE(b().TakeVersions().empty());
  a().Ask(a().Push(0, 1, 1.0f));
  sink_->held.front()();
  sink_->held.erase(sink_->held.begin());
  EXPECT_EQ(b().TakeVersions(), (std::map<uint32_t, uint64_t>{{0, 2}}));  // without what came after it
  EXPECT_TRUE(a().TakeVersions().empty());
  sink_->Release();
  EXPECT_EQ(a().TakeVersions(), (std::map<uint32_t, uint64_t>{{0, 3}}));
}

// The frame that beat it is merged, its version is still being made: an answer of the version before would be dropped
// by the worker, which would wait for another one for ever.
TEST_F(AsyncJobTest, WhatWasNotIncludedIsAnsweredWithTheVersionThatBeatIt) {
  Start();
  sink_->appended = [this] {
    const v1::PushAck late = b().Push(1, 0, 1.0f);
    EXPECT_EQ(late.outcome(), v1::PUSH_NOT_INCLUDED);
    EXPECT_EQ(late.made(), 1u);
    b().Ask(late);
    EXPECT_TRUE(b().TakeVersions().empty());
  };
  EXPECT_EQ(a().Push(1, 0, 1.0f).made(), 1u);
  EXPECT_EQ(b().TakeVersions(), (std::map<uint32_t, uint64_t>{{1, 1}}));
}

TEST_F(AsyncJobTest, ChunksOfSeveralWorkersDoNotMix) {
  spec_.mutable_tensors(0)->set_shape(0, 4096);  // 1 MiB: more than one chunk
  spec_.set_bucket_bytes(8 << 20);
  Start();
  uint32_t large = 0;
  while (a().frames.Push(large, 1, 0.0f).size() == 1) ++large;
  if (large != 0) {
    ASSERT_EQ(a().Push(large, 0, 1.0f).made(), 1u);
  }
  const auto of_a = a().frames.Push(large, 1, 1.0f), of_b = b().frames.Push(large, 1, 2.0f);
  ASSERT_GT(of_a.size(), 1u);
  EXPECT_FALSE(a().Chunk(of_a[0]).has_value());
  EXPECT_EQ(b().Push(of_b).made(), 2u);  // waits for nobody
  EXPECT_FALSE(b().Chunk(b().frames.Push(large, 2, 3.0f)[0]).has_value());
  std::optional<v1::PushAck> ack;
  for (size_t i = 1; i < of_a.size(); ++i) ack = a().Chunk(of_a[i]);
  ASSERT_TRUE(ack.has_value());
  EXPECT_EQ(ack->made(), 3u);
  // p = 1 - 0.5 * 2 - 0.5 * 1
  a().Ask(*ack);
  const BucketLayout& layout = a().frames.at(large);
  std::vector<Bytes> chunks;
  for (const auto& message : a().received->sent)
    chunks.insert(chunks.end(), message.frame.begin(), message.frame.end());
  std::vector<float> values(layout.elements);
  const auto plans = DecodeParameters(chunks, a().frames.job(), layout, 3, {.parameter = values.data()});
  ASSERT_TRUE(plans.ok()) << plans.status();
  EXPECT_THAT(values, testing::Each(-0.5f));
}

TEST_F(AsyncJobTest, BadFramesAreRefusedAndNothingOfThemStays) {
  Start();
  const std::string before = Digest(*shard_);
  const v1::PushAck future = b().Push(0, 2, 1.0f);
  EXPECT_EQ(future.outcome(), v1::PUSH_REFUSED);
  EXPECT_THAT(future.message(), HasSubstr("computed on version 2, but version 1 is the newest"));
  auto flipped = b().frames.Push(0, 1, 1.0f);
  flipped[0] = testing_support::FlipBit(flipped[0], 8 * flipped[0].size() - 9);
  EXPECT_EQ(shard_->intake().Take(b().stream, {&flipped[0], 1}).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(Digest(*shard_), before);
  EXPECT_EQ(b().Push(0, 1, 1.0f).outcome(), v1::PUSH_INCLUDED);
  const v1::PushAck again = b().Push(0, 1, 1.0f);
  EXPECT_EQ(again.outcome(), v1::PUSH_DUPLICATE);
  EXPECT_EQ(again.made(), 2u);
  const v1::PushAck other = b().Push(0, 1, 3.0f);
  EXPECT_EQ(other.outcome(), v1::PUSH_REFUSED);
  EXPECT_THAT(other.message(), HasSubstr("a repeat must be the same bytes"));
  v1::PullRequest pull;
  pull.set_kind(v1::PULL_UPDATE);
  pull.set_version(1);
  pull.set_bucket_end(1);
  const absl::Status update = shard_->desk().Pull(b().stream.member, pull, b().out);
  EXPECT_EQ(update.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(update.message()), HasSubstr("pull parameters"));
}

TEST_F(AsyncJobTest, FramesOfAnotherPlanAreRefused) {
  spec_.set_codec("dense:values=fixed32");
  Start();
  const v1::PushAck ack = b().Push(0, 1, 1.0f);  // encoded by the plan of version 0
  EXPECT_EQ(ack.outcome(), v1::PUSH_REFUSED);
  EXPECT_THAT(ack.message(), HasSubstr("plan"));
}

TEST_F(AsyncJobTest, WhatIsOlderThanTheWindowIsNotIncluded) {
  Start();
  for (uint64_t on = 1; on < 5; ++on) ASSERT_EQ(a().Push(0, on, 1.0f).outcome(), v1::PUSH_INCLUDED);
  EXPECT_EQ(b().Push(0, 1, 1.0f).outcome(), v1::PUSH_NOT_INCLUDED);
  EXPECT_EQ(b().Push(0, 0, 1.0f).outcome(), v1::PUSH_NOT_INCLUDED);
  EXPECT_EQ(b().Push(0, 2, 1.0f).made(), 6u);
  EXPECT_EQ(shard_->Describe(false, false).not_included_frames(), 2u);
}

TEST_F(AsyncJobTest, TheJournalBringsBackTheBitsAndTheFrames) {
  Start();
  a().Push(1, 0, 1.0f);
  for (uint64_t on = 1; on < 6; ++on) {
    a().Push(0, on, 0.3f);
    if (on % 2 == 0) b().Push(0, on - 1, 0.7f);
  }
  EXPECT_EQ(records_.back().contributions.size(), 1u);
  const std::shared_ptr<JobShard> recovered = Make();
  const absl::Status status = recovered->recovery().Recover(nullptr, Read(records_));
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(Digest(*recovered), Digest(*shard_));
  RawWorker back(recovered.get(), spec_, "a");
  Rounds::ResumePoint point;
  point.from_before = true;
  point.versions = {8, 1};
  ASSERT_TRUE(recovered->Resume(back.identity, point).ok());
  back.Attach();
  EXPECT_EQ(back.Push(0, 5, 0.3f).outcome(), v1::PUSH_DUPLICATE);
  point.versions = {9, 1};
  EXPECT_EQ(recovered->Resume(back.identity, point).status().code(), absl::StatusCode::kDataLoss);
  // `gradwire verify` sees the same.
  const Layout layout = *Layout::Make(a().frames.job(), 1);
  const auto backend = *kernels::MakeBackend("reference");
  auto replay = ShardReplay::Make(&a().frames.job(), &layout, 0, backend.get(), std::nullopt);
  ASSERT_TRUE(replay.ok());
  for (const journal::Record& record : records_) ASSERT_TRUE((*replay)->Apply(record).ok());
  EXPECT_TRUE((*replay)->whole());
  EXPECT_EQ((*replay)->version(), 1u);
}

TEST_F(AsyncJobTest, ASnapshotHasEveryBucketAtItsOwnVersion) {
  Start();
  a().Push(0, 1, 0.3f);
  sink_->hold = true;
  a().Push(0, 2, 0.3f);
  EXPECT_EQ(shard_->snapshots().Gather(*shard_->snapshots().NewCopy(), absl::ZeroDuration()).code(),
            absl::StatusCode::kDeadlineExceeded);
  sink_->Release();
  const auto capture = *shard_->snapshots().NewCopy();
  ASSERT_EQ(shard_->snapshots().Gather(capture, absl::Seconds(10)), absl::OkStatus());
  const ShardState& state = capture->state;
  EXPECT_EQ(state.version, 0u);
  EXPECT_EQ(state.buckets[0].ahead, 3u);
  EXPECT_EQ(state.buckets[1].ahead, 0u);
  shard_->log().CutBehind(9, 9);
  EXPECT_EQ(sink_->keep_from, 9u - 4u);  // frames may be as old as their plans are kept
  b().Push(0, 1, 0.5f);                  // older than the snapshot
  sink_->Release();
  const std::shared_ptr<JobShard> recovered = Make();
  const absl::Status status = recovered->recovery().Recover(&state, Read(records_));
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(Digest(*recovered), Digest(*shard_));
}

TEST_F(AsyncJobTest, AStandbyFollowsToTheSameBitsAndKnowsTheFrames) {
  spec_.set_codec("tagc:density=0.5");
  Start();
  a().Push(1, 0, 1.0f);
  const std::shared_ptr<JobShard> standby = Make();
  std::vector<journal::Record> first;
  for (uint32_t b = 0; b < a().frames.buckets(); ++b) {
    const auto copy = shard_->log().CopyBucket(b);
    ASSERT_TRUE(copy.ok()) << copy.status();
    ASSERT_EQ(copy->size(), 1u);
    ASSERT_EQ((*copy)[0].contributions.size(), 1u);
    first.insert(first.end(), copy->begin(), copy->end());
  }
  const std::vector<journal::Record> nothing;
  ASSERT_TRUE(standby->recovery().Begin(nullptr, Read(nothing)).ok());
  std::vector<journal::Record> taken;
  standby->log().SetSink(std::make_unique<KeepingSink>(&taken));
  for (const journal::Record& record : first) ASSERT_TRUE(standby->recovery().Follow(record, [] {}).ok());
  const size_t before = records_.size();
  const auto calibrated = std::find_if(records_.begin(), records_.end(), [](const journal::Record& record) {
    return record.type == journal::RecordType::kUpdate && record.bucket == 0;
  });
  ASSERT_TRUE(a().frames.Follow(0, calibrated->chunks).ok());  // the plan of version 1
  a().Push(0, 1, 0.25f);
  ASSERT_EQ(records_.size(), before + 1);
  ASSERT_TRUE(standby->recovery().Follow(records_.back(), [] {}).ok());
  EXPECT_EQ(Digest(*standby), Digest(*shard_));
  ASSERT_TRUE(standby->recovery().End().ok());
  RawWorker back(standby.get(), spec_, "a");
  ASSERT_TRUE(standby->Resume(back.identity, {}).ok());
  back.Attach();
  EXPECT_EQ(back.Push(1, 0, 1.0f).outcome(), v1::PUSH_DUPLICATE);
}

}  // namespace
}  // namespace gradwire

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
#include "tests/unit/server/holding_sink.h"
#include "tests/unit/server/job_shard_fixture.h"

namespace gradwire {
namespace {

using testing::HasSubstr;
using testing_support::HoldingSink;
using testing_support::JobShardTest;
using testing_support::SetHoldingSink;
using testing_support::SmallSpec;
using testing_support::TestWorker;

// Its parameters come with acknowledgements.
struct AsyncWorker : TestWorker {
  AsyncWorker(JobShard* shard, const v1::JobSpec& spec, const std::string& name)
      : TestWorker(shard, spec, name, /*incarnation=*/1) {}
  using TestWorker::Push;
  v1::PushAck Push(uint32_t bucket, uint64_t on, float value) { return Push(frames.Push(bucket, on, value)); }
  void Ask(const v1::PushAck& ack) { Acknowledge(ack, {v1::PULL_PARAMS_F32}); }
  // The versions of the parameters that were sent with acknowledgements since the last call, by bucket.
  std::map<uint32_t, uint64_t> TakeVersions() {
    std::map<uint32_t, uint64_t> versions;
    for (const transport::Message& message : pull->sent) {
      v1::PushAck ack;
      EXPECT_TRUE(ack.ParseFromString(message.control));
      if (message.frame.empty()) continue;
      EXPECT_EQ(ack.kind(), v1::PULL_PARAMS_F32);
      versions[ack.bucket()] = wire::ParseHeader(wire::Flatten(message.frame).span())->round;
    }
    pull->sent.clear();
    return versions;
  }
};

class AsyncJobTest : public JobShardTest {
 protected:
  AsyncJobTest() {
    environment_.frame_limit_bytes = 16 << 20;
    spec_ = SmallSpec("job", 3);
    spec_.mutable_rounds()->set_mode(v1::ROUNDS_ASYNC);
    spec_.mutable_rounds()->set_staleness(3);
  }
  // Two workers of a job whose bucket 0 is at version 1.
  void Start() {
    JobShardTest::Start(spec_);
    sink_ = &SetHoldingSink(shard_->log());
    sink_->holds = false;
    for (const char* name : {"a", "b"}) {
      workers_.push_back(std::make_unique<AsyncWorker>(shard_.get(), spec_, name));
      ASSERT_TRUE(workers_.back()->Join().ok());
    }
    a().InitializeAllRecorded(1.0f);
    EXPECT_EQ(a().Push(0, 0, 1.0f).made(), 1u);
  }
  AsyncWorker& a() { return *workers_[0]; }
  AsyncWorker& b() { return *workers_[1]; }
  static std::function<absl::Status(const Recovery::RecordVisitor&)> Read(const std::vector<journal::Record>& records) {
    return [&records](const Recovery::RecordVisitor& visit) {
      for (const journal::Record& record : records) {
        const absl::Status status = visit(record);
        if (!status.ok()) return status;
      }
      return absl::OkStatus();
    };
  }

  HoldingSink* sink_ = nullptr;
  std::vector<std::unique_ptr<AsyncWorker>> workers_;
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
  sink_->holds = true;
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
  for (const auto& message : a().pull->sent)
    if (!message.frame.empty()) chunks.push_back(wire::Flatten(message.frame));
  std::vector<float> values(layout.elements);
  const auto plans = DecodeParameters(chunks, a().frames.job(), layout, 3, {.parameter = values.data()});
  ASSERT_TRUE(plans.ok()) << plans.status();
  EXPECT_THAT(values, testing::Each(-0.5f));
}

TEST_F(AsyncJobTest, BadFramesAreRefusedAndNothingOfThemStays) {
  Start();
  const std::string before = Digest();
  const v1::PushAck future = b().Push(0, 2, 1.0f);
  EXPECT_EQ(future.outcome(), v1::PUSH_REFUSED);
  EXPECT_THAT(future.message(), HasSubstr("computed on version 2, but version 1 is the newest"));
  auto flipped = b().frames.Push(0, 1, 1.0f);
  flipped[0] = testing_support::FlipBit(flipped[0], 8 * flipped[0].size() - 9);
  EXPECT_EQ(shard_->intake().Take(b().stream, {&flipped[0], 1}).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(Digest(), before);
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
  EXPECT_EQ(sink_->records.back().contributions.size(), 1u);
  const std::shared_ptr<JobShard> recovered = Make();
  const absl::Status status = recovered->recovery().Recover(nullptr, Read(sink_->records));
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(DigestOf(*recovered), Digest());
  AsyncWorker back(recovered.get(), spec_, "a");
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
  for (const journal::Record& record : sink_->records) ASSERT_TRUE((*replay)->Apply(record).ok());
  EXPECT_TRUE((*replay)->whole());
  EXPECT_EQ((*replay)->version(), 1u);
}

TEST_F(AsyncJobTest, ASnapshotHasEveryBucketAtItsOwnVersion) {
  Start();
  a().Push(0, 1, 0.3f);
  sink_->holds = true;
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
  EXPECT_EQ(sink_->kept_from, 9u - 4u);  // frames may be as old as their plans are kept
  b().Push(0, 1, 0.5f);                  // older than the snapshot
  sink_->Release();
  const std::shared_ptr<JobShard> recovered = Make();
  const absl::Status status = recovered->recovery().Recover(&state, Read(sink_->records));
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(DigestOf(*recovered), Digest());
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
  SetHoldingSink(standby->log()).holds = false;
  for (const journal::Record& record : first) ASSERT_TRUE(standby->recovery().Follow(record, [] {}).ok());
  const size_t before = sink_->records.size();
  const auto calibrated = std::find_if(sink_->records.begin(), sink_->records.end(), [](const journal::Record& record) {
    return record.type == journal::RecordType::kUpdate && record.bucket == 0;
  });
  ASSERT_TRUE(a().frames.Follow(0, calibrated->chunks).ok());  // the plan of version 1
  a().Push(0, 1, 0.25f);
  ASSERT_EQ(sink_->records.size(), before + 1);
  ASSERT_TRUE(standby->recovery().Follow(sink_->records.back(), [] {}).ok());
  EXPECT_EQ(DigestOf(*standby), Digest());
  ASSERT_TRUE(standby->recovery().End().ok());
  AsyncWorker back(standby.get(), spec_, "a");
  ASSERT_TRUE(standby->Resume(back.identity, {}).ok());
  back.Attach();
  EXPECT_EQ(back.Push(1, 0, 1.0f).outcome(), v1::PUSH_DUPLICATE);
}

}  // namespace
}  // namespace gradwire

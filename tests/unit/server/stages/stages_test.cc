// Each stage alone, with a next one that keeps what comes.
#include "server/stages/stages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/codec/update/update.h"
#include "tests/unit/server/holding_sink.h"
#include "tests/unit/server/test_job.h"

namespace gradwire {
namespace {

using testing::HasSubstr;
using testing_support::HoldingSink;
using testing_support::KeepingStage;
using testing_support::LoggedJob;
using testing_support::SetHoldingSink;
using testing_support::SmallSpec;
using testing_support::TestMember;

// One worker's job, whose rounds close with its frame.
class StagesTest : public testing::Test {
 protected:
  void Start(const v1::JobSpec& spec) {
    job_ = std::make_unique<LoggedJob>(spec);
    finish_ = std::make_unique<Finish>(&job_->parts(), job_->by_rounds().flow.get(), &job_->log, &next_);
    member_ = job_->Join("a");
    job_->Initialize(*member_, 1.0f);
  }
  // Asks for the update that makes a version of bucket 0.
  void Ask(uint64_t version) {
    v1::PullRequest request;
    request.set_kind(v1::PULL_UPDATE);
    request.set_version(version);
    request.set_bucket_end(1);
    ASSERT_TRUE(job_->desk.Pull(member_->id, request, member_->out).ok());
  }
  // What comes out of Finish when the worker's frame has closed a bucket.
  ClosedBucket Finished(uint32_t bucket, uint64_t round, float value) {
    job_->decided.close.clear();
    job_->Merge(*member_, bucket, round, value);
    EXPECT_EQ(job_->decided.close.size(), 1u);
    next_.passed.clear();
    finish_->Pass(job_->Closed(bucket));
    EXPECT_EQ(next_.passed.size(), 1u);
    return std::move(next_.passed.at(0));
  }
  std::vector<Bytes> Update(uint32_t b) {
    absl::MutexLock lock(&job_->bucket(b).mu);
    return job_->bucket(b).updates.back().frame->pieces();
  }

  std::unique_ptr<LoggedJob> job_;
  KeepingStage next_;
  std::unique_ptr<Finish> finish_;
  std::unique_ptr<TestMember> member_;
};

TEST_F(StagesTest, FinishMakesTheUpdateAndSaysWhoTookPart) {
  Start(SmallSpec("job", 1));
  EXPECT_TRUE(Finished(0, 0, 1.0f).who.empty()) << "nothing is journaled";
  SetHoldingSink(job_->log);
  const ClosedBucket closed = Finished(1, 0, 1.0f);
  EXPECT_EQ(closed.status, absl::OkStatus());
  EXPECT_FALSE(closed.update.chunks.empty());
  ASSERT_EQ(closed.who.size(), 1u);
  EXPECT_EQ(closed.who[0].worker, "a");
  EXPECT_TRUE(closed.who[0].included);
}

TEST_F(StagesTest, TracedNotesHowLongTheStageBeforeHadTheBucket) {
  Start(SmallSpec("job", 1));
  TraceRecorder& trace = job_->parts().trace;
  Traced behind(&trace, v1::TRACE_TWO_WAY, &next_);
  Traced front(&trace, v1::TRACE_UNSPECIFIED, &next_);
  const auto pass = [&](uint64_t round) {
    ClosedBucket closed;
    closed.bucket = &job_->bucket(1);
    closed.close.bucket = 1;
    closed.close.round = round;
    next_.passed.clear();
    front.Pass(std::move(closed));
    job_->clock().now += 30;
    closed = std::move(next_.passed.at(0));
    behind.Pass(std::move(closed));
    EXPECT_EQ(next_.passed.size(), 2u);
  };
  pass(3);
  EXPECT_EQ(trace.Read(0, 10).total, 0u) << "nobody asked";
  trace.Record(4, 1);
  pass(3);
  pass(4);
  const TraceRecorder::Page page = trace.Read(0, 10);
  ASSERT_EQ(page.notes.size(), 1u);
  EXPECT_EQ(page.notes[0].subject.stage, v1::TRACE_TWO_WAY);
  EXPECT_EQ(page.notes[0].subject.round, 4u);
  EXPECT_EQ(page.notes[0].subject.bucket, 1u);
  EXPECT_EQ(page.notes[0].end_ns - page.notes[0].begin_ns, 30);
}

TEST_F(StagesTest, FinishPassesOnWhyThereIsNoUpdate) {
  Start(SmallSpec("job", 1));
  ClosedBucket closed;
  closed.bucket = &job_->bucket(0);
  closed.close.contributors = 2;  // nothing is merged
  finish_->Pass(std::move(closed));
  ASSERT_EQ(next_.passed.size(), 1u);
  EXPECT_EQ(next_.passed[0].status.code(), absl::StatusCode::kInternal);
}

TEST_F(StagesTest, RecordPassesOnBeforeItIsSafe) {
  Start(SmallSpec("job", 1));
  HoldingSink& sink = SetHoldingSink(job_->log);
  std::vector<std::pair<uint32_t, uint64_t>> safe;
  KeepingStage next;
  Record record(
      &job_->log, [&](uint32_t bucket, uint64_t version) { safe.emplace_back(bucket, version); }, &next);
  record.Pass(Finished(1, 0, 1.0f));
  ASSERT_EQ(next.passed.size(), 1u) << "it is applied while it is written";
  ASSERT_EQ(sink.records.size(), 1u);
  EXPECT_EQ(sink.records[0].bucket, 1u);
  EXPECT_EQ(sink.records[0].chunks.size(), next.passed[0].update.chunks.size());
  EXPECT_TRUE(safe.empty());
  sink.held[0]();
  EXPECT_EQ(safe, (std::vector<std::pair<uint32_t, uint64_t>>{{1, 1}}));
}

TEST_F(StagesTest, RecordWritesNothingOfABucketThatStopped) {
  Start(SmallSpec("job", 1));
  HoldingSink& sink = SetHoldingSink(job_->log);
  KeepingStage next;
  Record record(
      &job_->log, [](uint32_t, uint64_t) {}, &next);
  ClosedBucket closed;
  closed.bucket = &job_->bucket(0);
  closed.status = absl::InternalError("it broke");
  record.Pass(std::move(closed));
  EXPECT_TRUE(sink.records.empty());
  ASSERT_EQ(next.passed.size(), 1u);
  EXPECT_EQ(next.passed[0].status, absl::InternalError("it broke"));
}

TEST_F(StagesTest, ApplyMakesTheVersionAndTakesTheAnswersThatAreDue) {
  Start(SmallSpec("job", 1));
  Ask(1);
  job_->apply.Pass(Finished(0, 0, 1.0f));
  ASSERT_EQ(job_->applied.passed.size(), 1u);
  EXPECT_EQ(job_->applied.passed[0].status, absl::OkStatus());
  ASSERT_EQ(job_->applied.passed[0].answers.size(), 1u);
  EXPECT_TRUE(member_->received->sent.empty()) << "nothing is sent under a lock: that is for the next stage";
  absl::MutexLock lock(&job_->bucket(0).mu);
  EXPECT_EQ(job_->bucket(0).version, 1u);
  EXPECT_NE(job_->bucket(0).Find(1), nullptr) << "the next round is open";
}

TEST_F(StagesTest, ApplyStopsTheBucketThatHasNoUpdate) {
  Start(SmallSpec("job", 1));
  Ask(1);
  ClosedBucket closed;
  closed.bucket = &job_->bucket(0);
  closed.status = absl::InternalError("it broke");
  job_->apply.Pass(std::move(closed));
  ASSERT_EQ(job_->applied.passed.size(), 1u);
  ASSERT_EQ(job_->applied.passed[0].answers.size(), 1u);
  EXPECT_THAT(std::string(job_->applied.passed[0].answers[0].status.message()), HasSubstr("it broke"));
  absl::MutexLock lock(&job_->bucket(0).mu);
  EXPECT_EQ(job_->bucket(0).version, 0u);
  EXPECT_FALSE(job_->bucket(0).failure.ok());
}

TEST_F(StagesTest, PublishAnswersWhenARecordIsSafe) {
  Start(SmallSpec("job", 1));
  SetHoldingSink(job_->log);
  Publish publish(&job_->parts(), &job_->snapshots, &job_->desk);
  Ask(1);
  job_->apply.Pass(Finished(0, 0, 1.0f));
  publish.Pass(std::move(job_->applied.passed.at(0)));
  EXPECT_TRUE(member_->received->sent.empty());
  publish.NoteSafe(0, 1);
  EXPECT_FALSE(member_->received->sent.empty());
}

TEST_F(StagesTest, TwoWayEncodesTheMeanOnceMore) {
  v1::JobSpec spec = SmallSpec("job", 1);
  spec.set_update_codec("topk:density=0.02,values=fp16");
  Start(spec);
  KeepingStage next;
  TwoWay two_way(&next);
  const uint32_t buckets = job_->frames().buckets();
  for (uint32_t b = 0; b < buckets; ++b) {
    two_way.Pass(Finished(b, 0, 1.0f));
    ASSERT_EQ(next.passed.back().status, absl::OkStatus());
    job_->apply.Pass(std::move(next.passed.back()));
    ASSERT_EQ(job_->applied.passed.back().status, absl::OkStatus());
    ASSERT_TRUE(job_->frames().Follow(b, Update(b)).ok());
  }
  ClosedBucket closed = Finished(0, 1, 1.0f);
  const std::vector<Bytes> mean = closed.update.chunks;
  two_way.Pass(std::move(closed));
  const UpdateFrame& made = next.passed.back().update;
  EXPECT_EQ(next.passed.back().status, absl::OkStatus());
  EXPECT_EQ(TotalSize(made.mean), TotalSize(mean)) << "what it was made of, for the journal";
  EXPECT_LT(TotalSize(made.chunks), TotalSize(mean)) << "few of the elements are sent";
}

TEST_F(StagesTest, TwoWayLeavesAloneWhatHasNoUpdate) {
  Start(SmallSpec("job", 1));
  KeepingStage next;
  TwoWay two_way(&next);
  ClosedBucket stopped;
  stopped.bucket = &job_->bucket(0);
  stopped.status = absl::InternalError("it broke");
  two_way.Pass(std::move(stopped));
  EXPECT_EQ(next.passed.back().status, absl::InternalError("it broke"));
}

TEST_F(StagesTest, AgreementHoldsARoundUntilAllItsBucketsHaveClosed) {
  v1::JobSpec spec = SmallSpec("job", 1);
  spec.set_clip_norm(1.0f);
  Start(spec);
  KeepingStage next;
  Turn turn(&next);
  absl::Status stopped;
  Agreement agreement(
      &job_->parts(), [&](uint64_t, const absl::Status& why) { stopped = why; }, &next);
  ASSERT_TRUE(agreement.Start(&turn).ok());
  const uint32_t buckets = job_->frames().buckets();
  for (uint32_t b = 0; b < buckets; ++b) {
    agreement.Pass(Finished(b, 0, 1.0f));
    ASSERT_EQ(next.passed.size(), b + 1) << "round 0 has nothing to agree on";
    job_->apply.Pass(std::move(next.passed.back()));
    ASSERT_TRUE(job_->frames().Follow(b, Update(b)).ok());
  }
  next.passed.clear();
  for (uint32_t b = 0; b < buckets; ++b) {
    EXPECT_TRUE(next.passed.empty());
    agreement.Pass(Finished(b, 1, 1.0f));
    EXPECT_TRUE(agreement.HasWork());
    agreement.Pump();
  }
  ASSERT_EQ(next.passed.size(), buckets) << stopped;
  for (ClosedBucket& closed : next.passed) {
    EXPECT_EQ(closed.status, absl::OkStatus());
    EXPECT_TRUE(closed.update.decoded->mean_square.has_value()) << "what the shards agreed on";
  }
  agreement.Stop();
}

TEST_F(StagesTest, AgreementStopsTheJobWhereABucketHasNoUpdate) {
  v1::JobSpec spec = SmallSpec("job", 1);
  spec.set_clip_norm(1.0f);
  Start(spec);
  KeepingStage next;
  Turn turn(&next);
  std::vector<std::pair<uint64_t, absl::Status>> stopped;
  Agreement agreement(
      &job_->parts(), [&](uint64_t round, const absl::Status& why) { stopped.emplace_back(round, why); }, &next);
  ASSERT_TRUE(agreement.Start(&turn).ok());
  ClosedBucket closed;
  closed.bucket = &job_->bucket(0);
  closed.close.round = 1;
  closed.status = absl::InternalError("it broke");
  agreement.Pass(std::move(closed));
  ASSERT_EQ(stopped.size(), 1u);
  EXPECT_EQ(stopped[0].first, 1u);
  EXPECT_EQ(stopped[0].second, absl::InternalError("it broke"));
  EXPECT_TRUE(next.passed.empty());
}

}  // namespace
}  // namespace gradwire

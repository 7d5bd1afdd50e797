// What a job answers to a frame: taken, taken before, refused, damaged; and to initial parameters.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "common/codec/frame/parameters.h"
#include "tests/unit/server/holding_sink.h"
#include "tests/unit/server/job_shard_fixture.h"

namespace gradwire {
namespace {

using testing::HasSubstr;
using testing_support::Answered;
using testing_support::FlipBit;
using testing_support::HoldingSink;
using testing_support::JobShardTest;
using testing_support::RecordingStream;
using testing_support::SetHoldingSink;
using testing_support::SmallSpec;
using testing_support::TestWorker;

TEST_F(JobShardTest, RepeatIsADuplicateAndOtherBytesAreRefused) {
  Start(SmallSpec("job", 2));
  TestWorker a = Worker("a"), b = Worker("b");
  StartTwo(&a, &b);
  const auto frame = a.frames.Push(0, 1, 1.0f);
  EXPECT_EQ(a.Push(frame).outcome(), v1::PUSH_INCLUDED);
  EXPECT_EQ(a.Push(frame).outcome(), v1::PUSH_DUPLICATE);
  const v1::PushAck other = a.Push(a.frames.Push(0, 1, 2.0f));
  EXPECT_EQ(other.outcome(), v1::PUSH_REFUSED);
  EXPECT_EQ(other.code(), static_cast<int>(absl::StatusCode::kFailedPrecondition));
  EXPECT_EQ(b.Push(b.frames.Push(0, 1, 1.0f)).outcome(), v1::PUSH_INCLUDED);
  EXPECT_EQ(a.Push(frame).outcome(), v1::PUSH_DUPLICATE);  // the bucket has closed
}

TEST_F(JobShardTest, DifferentLearningRateIsRefusedNamingBothAndTheRoundGoesOn) {
  Start(SmallSpec("job", 2));
  TestWorker a = Worker("a"), b = Worker("b");
  StartTwo(&a, &b);
  EXPECT_EQ(a.Push(a.frames.Push(0, 1, 1.0f, 0.5f)).outcome(), v1::PUSH_INCLUDED);
  const v1::PushAck ack = b.Push(b.frames.Push(0, 1, 1.0f, 0.25f));
  EXPECT_EQ(ack.outcome(), v1::PUSH_REFUSED);
  EXPECT_THAT(ack.message(), testing::AllOf(HasSubstr("0.5"), HasSubstr("0.25"), HasSubstr("worker 'b'")));
  a.Pull(v1::PULL_UPDATE, 2);
  const auto answers = a.TakeAnswers();
  ASSERT_EQ(answers.size(), 1u);  // bucket 0 closed over a alone
  const auto update = a.frames.Follow(0, answers[0].chunks);
  ASSERT_TRUE(update.ok());
  EXPECT_EQ(update->contributors, 1u);
}

TEST_F(JobShardTest, ANewcomersLearningRateDoesNotEndThoseWhoAreThere) {
  Start(SmallSpec("job", 2));
  TestWorker a = Worker("a"), b = Worker("b");
  StartTwo(&a, &b);
  EXPECT_EQ(b.Push(b.frames.Push(0, 1, 1.0f, 0.25f)).outcome(), v1::PUSH_INCLUDED);
  EXPECT_EQ(a.Push(a.frames.Push(0, 1, 1.0f, 0.5f)).outcome(), v1::PUSH_INCLUDED);
  a.Pull(v1::PULL_UPDATE, 2);
  const auto answers = a.TakeAnswers();
  ASSERT_EQ(answers.size(), 1u);
  const auto update = a.frames.Follow(0, answers[0].chunks);
  ASSERT_TRUE(update.ok());
  EXPECT_EQ(update->contributors, 2u);
  EXPECT_THAT(update->learning_rates, testing::ElementsAre(0.5f));
  const v1::PushAck ack = b.Push(b.frames.Push(1, 1, 1.0f, 0.25f));
  EXPECT_EQ(ack.outcome(), v1::PUSH_REFUSED);
  EXPECT_THAT(ack.message(),
              testing::AllOf(HasSubstr("0.25"), HasSubstr("0.5 of worker 'a'"), HasSubstr("for longer")));
  EXPECT_EQ(a.Push(a.frames.Push(1, 1, 1.0f, 0.5f)).outcome(), v1::PUSH_INCLUDED);
}

TEST_F(JobShardTest, NonFiniteGradientIsRefusedAndStateIsUnchanged) {
  Start(SmallSpec("job", 2));
  TestWorker a = Worker("a"), b = Worker("b");
  StartTwo(&a, &b);
  const std::string before = Digest();
  const v1::PushAck ack = a.Push(a.frames.Push(0, 1, std::numeric_limits<float>::quiet_NaN()));
  EXPECT_EQ(ack.outcome(), v1::PUSH_REFUSED);
  EXPECT_EQ(ack.code(), static_cast<int>(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(ack.message(), HasSubstr("weight"));
  EXPECT_EQ(Digest(), before);
  EXPECT_EQ(b.Push(b.frames.Push(0, 1, 2.0f)).outcome(), v1::PUSH_INCLUDED);
  EXPECT_NE(Digest(), before);  // b's step was applied without waiting for a
}

TEST_F(JobShardTest, FramesAreAcknowledgedAtOnceAndTheLastOfARoundTogetherWithItsUpdate) {
  Start(SmallSpec("job", 2));
  TestWorker a = Worker("a"), b = Worker("b");
  StartTwo(&a, &b);
  a.Acknowledge(a.Push(a.frames.Push(0, 1, 1.0f)), {v1::PULL_UPDATE});
  std::vector<v1::PushAck> sent = a.TakeAcks();
  ASSERT_EQ(sent.size(), 1u);
  EXPECT_EQ(sent[0].outcome(), v1::PUSH_INCLUDED);
  EXPECT_EQ(sent[0].kind(), v1::PULL_UNSPECIFIED);

  b.Acknowledge(b.Push(b.frames.Push(0, 1, 2.0f)), {v1::PULL_UPDATE, v1::PULL_PARAMS_F32});
  sent = a.TakeAcks();
  ASSERT_EQ(sent.size(), 1u);
  EXPECT_EQ(sent[0].outcome(), v1::PUSH_OUTCOME_UNSPECIFIED);
  EXPECT_EQ(sent[0].kind(), v1::PULL_UPDATE);
  EXPECT_EQ(sent[0].round(), 1u);
  sent = b.TakeAcks();
  ASSERT_EQ(sent.size(), 2u);
  EXPECT_EQ(sent[0].outcome(), v1::PUSH_INCLUDED);
  EXPECT_EQ(sent[0].kind(), v1::PULL_UPDATE);
  EXPECT_TRUE(sent[0].last());
  EXPECT_EQ(sent[1].outcome(), v1::PUSH_OUTCOME_UNSPECIFIED);
  EXPECT_EQ(sent[1].kind(), v1::PULL_PARAMS_F32);
}

TEST_F(JobShardTest, FramesBeyondThoseOfAllWorkersWaitAtTheirWorkers) {
  for (const char* codec : {"dense:fp32", "dense:fixed16", "tagc:density=0.1", "tagc:density=0.1,form=sketch",
                            "topk:density=1", "uniform:bits=4"}) {
    SCOPED_TRACE(codec);
    v1::JobSpec spec = SmallSpec("job", 2, codec);
    spec.set_max_workers(2);
    Start(spec);
    // The round waits for two workers at once, and takes the frames of those that do not stay.
    for (int w = 0; w < 2; ++w) {
      TestWorker passing = Worker("passing-" + std::to_string(w));
      ASSERT_TRUE(passing.Join().ok());
      if (w == 0) passing.InitializeAll(1.0f);
      PushAll(&passing, 0, 1.0f);
      ASSERT_TRUE(shard_->Leave(passing.LeaveRequest()).ok());
    }
    TestWorker a = Worker("a"), b = Worker("b");
    for (TestWorker* worker : {&a, &b}) {
      ASSERT_TRUE(worker->Join().ok());
      for (uint32_t k = 0; k < a.frames.buckets(); ++k) {
        const v1::PushAck ack = worker->Push(worker->frames.Push(k, 0, 1.0f));
        EXPECT_EQ(ack.outcome(), v1::PUSH_NOT_INCLUDED) << ack.message();
      }
    }
    EXPECT_EQ(shard_->Describe(false, false).version(), 1u) << "nobody is waited for";
    for (TestWorker* worker : {&a, &b}) worker->FollowUpdate(1);
    for (TestWorker* worker : {&a, &b}) PushAll(worker, 1, 1.0f);
  }
}

TEST_F(JobShardTest, ARefusedFrameIsAnsweredByItsRefusalAlone) {
  Start(SmallSpec("job", 1));
  TestWorker a = Worker("a");
  ASSERT_TRUE(a.Join().ok());
  a.InitializeAll(1.0f);
  PushAll(&a, 0, 1.0f);
  a.FollowUpdate(1);
  const v1::PushAck refused = a.Push(a.frames.Push(0, 1, std::numeric_limits<float>::quiet_NaN()));
  a.Acknowledge(refused, {v1::PULL_UPDATE});
  const std::vector<v1::PushAck> sent = a.TakeAcks();
  ASSERT_EQ(sent.size(), 1u);
  EXPECT_EQ(sent[0].outcome(), v1::PUSH_REFUSED);
  EXPECT_EQ(sent[0].kind(), v1::PULL_UNSPECIFIED);
}

TEST_F(JobShardTest, AnAnswerThatCannotBeGivenStillAcknowledges) {
  Start(SmallSpec("job", 1));
  TestWorker a = Worker("a");
  ASSERT_TRUE(a.Join().ok());
  a.InitializeAll(1.0f);
  for (uint64_t round = 0; round < 4; ++round) {
    PushAll(&a, round, 1.0f);
    a.FollowUpdate(round + 1);
  }
  v1::PushAck first;  // of round 0
  first.set_outcome(v1::PUSH_NOT_INCLUDED);
  a.Acknowledge(first, {v1::PULL_UPDATE});
  const std::vector<v1::PushAck> sent = a.TakeAcks();
  ASSERT_EQ(sent.size(), 1u);
  EXPECT_EQ(sent[0].outcome(), v1::PUSH_NOT_INCLUDED);
  EXPECT_EQ(sent[0].kind(), v1::PULL_UPDATE);
  EXPECT_EQ(sent[0].code(), static_cast<int>(absl::StatusCode::kOutOfRange));
  EXPECT_TRUE(sent[0].last());
  EXPECT_EQ(a.shard->desk()
                .AcknowledgeFrame(a.stream.member, first, std::vector{static_cast<v1::PullKind>(77)}, a.out)
                .code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(JobShardTest, DamagedChunkEndsTheStreamAndTheSameFrameCanFollow) {
  Start(SmallSpec("job", 2));
  TestWorker a = Worker("a"), b = Worker("b");
  StartTwo(&a, &b);
  const auto frame = a.frames.Push(0, 1, 1.0f);
  for (const size_t bit : {8 * (frame[0].size() - 1), size_t{8 * 16}}) {
    const Bytes flipped = FlipBit(frame[0], bit);
    EXPECT_EQ(shard_->intake().Take(a.stream, {&flipped, 1}).status().code(), absl::StatusCode::kDataLoss);
  }
  EXPECT_EQ(a.Push(frame).outcome(), v1::PUSH_INCLUDED) << "the round has waited for it";
}

TEST_F(JobShardTest, LostInitializerIsReplacedAndNothingOfItStays) {
  Start(SmallSpec("job", 2));
  TestWorker a = Worker("a"), b = Worker("b");
  ASSERT_TRUE(a.Join()->must_initialize());
  ASSERT_FALSE(b.Join()->must_initialize());
  EXPECT_EQ(a.Push(a.frames.Initialize(0, 5.0f)).outcome(), v1::PUSH_INCLUDED);
  b.Pull(v1::PULL_PARAMS_F32, 0);
  EXPECT_TRUE(b.TakeAnswers().empty());
  EXPECT_EQ(b.Push(b.frames.Initialize(0, 6.0f)).outcome(), v1::PUSH_REFUSED);
  ASSERT_TRUE(shard_->Leave(a.LeaveRequest()).ok());
  EXPECT_TRUE(shard_->Heartbeat(b.HeartbeatRequest())->must_initialize());
  b.InitializeAll(6.0f);
  const auto answers = b.TakeAnswers();
  ASSERT_EQ(answers.size(), b.frames.buckets());
  for (const Answered& answer : answers) {
    const BucketLayout& layout = b.frames.at(answer.control.bucket());
    std::vector<float> values(layout.elements);
    ASSERT_TRUE(DecodeParameters(answer.chunks, b.frames.job(), layout, 0, {.parameter = values.data()}).ok());
    EXPECT_THAT(values, testing::Each(6.0f));
  }
}

TEST_F(JobShardTest, NonFiniteInitialParametersAreRefused) {
  Start(SmallSpec("job", 1));
  TestWorker a = Worker("a");
  ASSERT_TRUE(a.Join().ok());
  const v1::PushAck ack = a.Push(a.frames.Initialize(0, std::numeric_limits<float>::infinity()));
  EXPECT_EQ(ack.outcome(), v1::PUSH_REFUSED);
  EXPECT_EQ(a.Push(a.frames.Initialize(0, 1.0f)).outcome(), v1::PUSH_INCLUDED);
}

TEST_F(JobShardTest, InitialParametersThatComeAgainAreAcknowledgedOnceTheyAreWritten) {
  Start(SmallSpec("job", 1));
  HoldingSink& sink = SetHoldingSink(shard_->log());
  TestWorker a = Worker("a");
  ASSERT_TRUE(a.Join().ok());
  a.PushUnanswered(a.frames.Initialize(0, 1.0f));
  const std::shared_ptr<RecordingStream> first = a.pull;
  a.out->Close();
  shard_->intake().AbandonStream(a.stream);
  ASSERT_TRUE(a.Join().ok());  // on a new stream
  a.PushUnanswered(a.frames.Initialize(0, 1.0f));
  EXPECT_EQ(a.Push(a.frames.Initialize(0, 2.0f)).outcome(), v1::PUSH_REFUSED);
  sink.Release();
  EXPECT_TRUE(first->sent.empty());
  const std::vector<v1::PushAck> acks = a.TakeAcks();
  ASSERT_EQ(acks.size(), 1u);
  EXPECT_EQ(acks[0].bucket(), 0u);
  EXPECT_EQ(acks[0].outcome(), v1::PUSH_INCLUDED);
  EXPECT_EQ(a.Push(a.frames.Initialize(0, 1.0f)).outcome(), v1::PUSH_DUPLICATE);
  EXPECT_EQ(a.Push(a.frames.Initialize(0, 2.0f)).outcome(), v1::PUSH_REFUSED);
  a.PushUnanswered(a.frames.Initialize(1, 1.0f));
  sink.Release();
  EXPECT_EQ(a.TakeAcks().size(), 1u);
  EXPECT_EQ(sink.records.size(), 2u);
  EXPECT_EQ(a.Push(a.frames.Initialize(1, 1.0f)).outcome(), v1::PUSH_DUPLICATE);
}

TEST_F(JobShardTest, AnInitializerThatIsLostBeforeItsRecordIsWrittenLeavesItsSuccessorToBeAcknowledged) {
  Start(SmallSpec("job", 1));
  HoldingSink& sink = SetHoldingSink(shard_->log());
  TestWorker a = Worker("a"), b = Worker("b");
  ASSERT_TRUE(a.Join().ok());
  ASSERT_TRUE(b.Join().ok());
  a.PushUnanswered(a.frames.Initialize(0, 1.0f));
  ASSERT_TRUE(shard_->Leave(a.LeaveRequest()).ok());
  b.PushUnanswered(b.frames.Initialize(0, 2.0f));
  ASSERT_EQ(sink.held.size(), 2u);
  const std::function<void()> of_b = std::move(sink.held.back());
  sink.held.pop_back();
  sink.Release();
  EXPECT_TRUE(b.TakeAcks().empty());  // that was the record of a
  of_b();
  EXPECT_TRUE(a.TakeAcks().empty());
  EXPECT_EQ(b.TakeAcks().size(), 1u);
}

}  // namespace
}  // namespace gradwire

// One job without a transport: frames in, acknowledgements and updates out, under a clock that the test moves.
#include "server/job/job_shard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/codec/frame/parameters.h"
#include "common/journal/record.h"
#include "server/job/job_registry.h"
#include "server/rounds/lateness.h"
#include "tests/unit/server/frame_maker.h"
#include "tests/unit/server/recording_stream.h"
#include "tests/unit/server/subject.h"

namespace gradwire {
namespace {

using testing::HasSubstr;
using testing_support::FlipBit;
using testing_support::FrameMaker;
using testing_support::RecordingStream;
using testing_support::SmallSpec;

constexpr TimeNs kMs = 1'000'000;

class ManualClock final : public Clock {
 public:
  TimeNs Now() override { return now; }
  std::atomic<TimeNs> now{1};
};

struct Answered {
  v1::PullMessage control;
  std::vector<Bytes> chunks;
};

// One worker of the test: its frames, its push stream and its pull stream.
struct TestWorker {
  TestWorker(JobShard* shard, const v1::JobSpec& spec, const std::string& name, uint64_t incarnation)
      : shard(shard), frames(spec, shard->shard_index(), shard->layout().shard_count(), incarnation) {
    identity.set_job(spec.name());
    identity.set_worker(name);
    identity.set_incarnation(incarnation);
  }
  absl::StatusOr<v1::JoinReply> Join() {
    auto reply = shard->Join(identity, 0, true);
    if (!reply.ok()) return reply;
    pull = std::make_shared<RecordingStream>();
    out = std::make_shared<Outbox>(pull);
    stream.member = *shard->Attach(identity, out);
    stream.incarnation = identity.incarnation();
    stream.worker = identity.worker();
    stream.out = out;
    return reply;
  }
  v1::HeartbeatRequest HeartbeatRequest(uint64_t sanitized_elements = 0) const {
    v1::HeartbeatRequest request;
    *request.mutable_identity() = identity;
    request.set_may_initialize(true);
    request.set_sanitized_elements(sanitized_elements);
    return request;
  }
  v1::LeaveRequest LeaveRequest(uint64_t sanitized_elements = 0) const {
    v1::LeaveRequest request;
    *request.mutable_identity() = identity;
    request.set_sanitized_elements(sanitized_elements);
    return request;
  }
  // The acknowledgement of the whole frame; fails the test when there is none.
  v1::PushAck Push(const std::vector<Bytes>& chunks) {
    for (const Bytes& chunk : chunks) {
      auto ack = shard->PushChunk(stream, {&chunk, 1});
      if (!ack.ok()) {
        ADD_FAILURE() << ack.status();
        return {};
      }
      if (*ack) return **ack;
    }
    ADD_FAILURE() << "no acknowledgement";
    return {};
  }
  void Acknowledge(const v1::PushAck& ack, const std::vector<v1::PullKind>& kinds) {
    EXPECT_TRUE(shard->Acknowledge(stream.member, ack, kinds, out).ok());
  }
  // What was sent by Acknowledge since the last call.
  std::vector<v1::PushAck> TakeAcks() {
    std::vector<v1::PushAck> acks(pull->sent.size());
    for (size_t i = 0; i < acks.size(); ++i) {
      EXPECT_TRUE(acks[i].ParseFromString(pull->sent[i].control));
      EXPECT_EQ(pull->sent[i].frame.empty(), acks[i].kind() == v1::PULL_UNSPECIFIED || acks[i].code() != 0);
    }
    pull->sent.clear();
    return acks;
  }
  // A frame that is not acknowledged yet.
  void PushUnanswered(const std::vector<Bytes>& chunks) {
    for (const Bytes& chunk : chunks) {
      const auto ack = shard->PushChunk(stream, {&chunk, 1});
      ASSERT_TRUE(ack.ok()) << ack.status();
      ASSERT_FALSE(ack->has_value()) << (*ack)->DebugString();
    }
  }
  void InitializeAll(float value) {
    for (uint32_t b = 0; b < frames.buckets(); ++b) {
      EXPECT_EQ(Push(frames.Initialize(b, value)).outcome(), v1::PUSH_INCLUDED);
    }
  }
  void Pull(v1::PullKind kind, uint64_t version) {
    v1::PullRequest request;
    request.set_kind(kind);
    request.set_version(version);
    request.set_bucket_end(frames.buckets());
    EXPECT_TRUE(shard->Pull(stream.member, request, out).ok());
  }
  std::vector<Answered> TakeAnswers() {
    std::vector<Answered> answers;
    std::vector<Bytes> chunks;
    for (const transport::Message& message : pull->sent) {
      Answered answer;
      EXPECT_TRUE(answer.control.ParseFromString(message.control));
      chunks.insert(chunks.end(), message.frame.begin(), message.frame.end());
      if (!answer.control.last()) continue;
      answer.chunks.swap(chunks);
      answers.push_back(std::move(answer));
    }
    pull->sent.clear();
    return answers;
  }
  // Pulls the update that makes `version` of every bucket and follows its plan.
  void FollowUpdate(uint64_t version) {
    Pull(v1::PULL_UPDATE, version);
    const auto answers = TakeAnswers();
    ASSERT_EQ(answers.size(), frames.buckets());
    for (const Answered& answer : answers) {
      ASSERT_EQ(answer.control.code(), 0) << answer.control.message();
      ASSERT_TRUE(frames.Follow(answer.control.bucket(), answer.chunks).ok());
    }
  }

  JobShard* shard;
  FrameMaker frames;
  v1::WorkerIdentity identity;
  PushStream stream;
  std::shared_ptr<RecordingStream> pull;
  std::shared_ptr<Outbox> out;
};

class JobShardTest : public testing::Test {
 protected:
  JobShardTest() {
    subject_->Set(&environment_);
    environment_.clock = &clock_;
    environment_.frame_limit_bytes = 1 << 20;
    environment_.job_memory_limit_bytes = 1 << 28;
  }
  void Start(const v1::JobSpec& spec) {
    spec_ = spec;
    auto shard = JobShard::Make(spec, 0, 1, environment_);
    ASSERT_TRUE(shard.ok()) << shard.status();
    shard_ = *shard;
  }
  TestWorker Worker(const std::string& name, uint64_t incarnation = 1) {
    return TestWorker(shard_.get(), spec_, name, incarnation);
  }
  // Two workers that have finished the calibration round.
  void StartTwo(TestWorker* a, TestWorker* b) {
    ASSERT_TRUE(a->Join().ok());
    ASSERT_TRUE(b->Join().ok());
    a->InitializeAll(1.0f);
    PushAll(a, 0, 1.0f);
    PushAll(b, 0, 1.0f);
    a->FollowUpdate(1);
    b->FollowUpdate(1);
  }
  void PushAll(TestWorker* w, uint64_t round, float value) {
    for (uint32_t k = 0; k < w->frames.buckets(); ++k) {
      const v1::PushAck ack = w->Push(w->frames.Push(k, round, value));
      ASSERT_EQ(ack.outcome(), v1::PUSH_INCLUDED) << ack.message();
    }
  }
  std::string Digest() { return shard_->Describe(false, true).parameters_sha256(); }

  ManualClock clock_;
  const std::unique_ptr<testing_support::Subject> subject_ = testing_support::MakeSubject();
  JobEnvironment environment_;
  v1::JobSpec spec_;
  std::shared_ptr<JobShard> shard_;
};

TEST_F(JobShardTest, TwoWorkersStepAndEveryPullerGetsTheSameBytes) {
  Start(SmallSpec("job", 2));
  TestWorker a = Worker("a"), b = Worker("b");
  StartTwo(&a, &b);
  a.Pull(v1::PULL_UPDATE, 2);
  b.Pull(v1::PULL_UPDATE, 2);
  PushAll(&a, 1, 1.0f);
  EXPECT_TRUE(a.TakeAnswers().empty());
  PushAll(&b, 1, 3.0f);
  const auto to_a = a.TakeAnswers(), to_b = b.TakeAnswers();
  ASSERT_EQ(to_a.size(), a.frames.buckets());
  ASSERT_EQ(to_b.size(), a.frames.buckets());
  EXPECT_EQ(to_a[0].chunks[0].data(), to_b[0].chunks[0].data());  // not even copied
  // p = 1 - 0.5 * mean(1, 3) = 0
  b.Pull(v1::PULL_PARAMS_F32, 2);
  for (const Answered& answer : b.TakeAnswers()) {
    const BucketLayout& layout = b.frames.at(answer.control.bucket());
    std::vector<float> values(layout.elements, -7.0f);
    const auto plan = DecodeParameters(answer.chunks, b.frames.job(), layout, 2, {.parameter = values.data()});
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_THAT(values, testing::Each(0.0f));
  }
  EXPECT_EQ(shard_->Describe(true, false).version(), 2u);
}

TEST_F(JobShardTest, EveryCodecStepsAndTheOrderOfArrivalDoesNotMatter) {
  for (const char* codec : {"dense:values=fp32", "dense:values=bf16", "dense:values=fixed32", "dense:values=fixed16",
                            "tagc:density=0.05"}) {
    SCOPED_TRACE(codec);
    std::string digests[2];
    for (const int order : {0, 1}) {
      Start(SmallSpec("job", 2, codec));
      TestWorker a = Worker("a"), b = Worker("b");
      StartTwo(&a, &b);
      const std::string before = Digest();
      for (uint64_t round = 1; round < 4; ++round) {
        PushAll(order == 0 ? &a : &b, round, order == 0 ? 0.75f : 0.5f);
        PushAll(order == 0 ? &b : &a, round, order == 0 ? 0.5f : 0.75f);
        a.FollowUpdate(round + 1);
        b.FollowUpdate(round + 1);
      }
      digests[order] = Digest();
      EXPECT_NE(digests[order], before);
      EXPECT_EQ(shard_->Describe(false, false).version(), 4u);
    }
    EXPECT_EQ(digests[0], digests[1]);
  }
}

TEST_F(JobShardTest, QuorumClosesOverThePartialFrameOfTheLateWorker) {
  v1::JobSpec spec = SmallSpec("job", 3);
  spec.mutable_rounds()->set_quorum(2);
  spec.mutable_tensors(0)->set_shape(0, 4096);  // 1 MiB: more than one chunk
  spec.set_bucket_bytes(8 << 20);
  environment_.frame_limit_bytes = 16 << 20;
  int sooner = 0;
  environment_.tick_sooner = [&sooner] { ++sooner; };
  Start(spec);
  TestWorker a = Worker("a"), b = Worker("b"), c = Worker("c");
  for (TestWorker* worker : {&a, &b, &c}) ASSERT_TRUE(worker->Join().ok());
  a.InitializeAll(1.0f);
  for (TestWorker* worker : {&a, &b, &c}) PushAll(worker, 0, 1.0f);
  // How late the last one is, is learned.
  uint64_t round = 1;
  for (; round <= Lateness::kFewest; ++round) {
    for (TestWorker* worker : {&a, &b}) PushAll(worker, round, 1.0f);
    clock_.now += 10 * kMs;
    PushAll(&c, round, 1.0f);
    clock_.now += 100 * kMs;
  }
  const std::string before = Digest();
  PushAll(&a, round, 2.0f);
  uint32_t large = 0;
  for (uint32_t k = 0; k < c.frames.buckets(); ++k) {
    const auto chunks = c.frames.Push(k, round, 100.0f);
    if (chunks.size() == 1) continue;
    large = k;
    const auto ack = shard_->PushChunk(c.stream, {&chunks[0], 1});
    ASSERT_TRUE(ack.ok() && !*ack);
  }
  const int told = sooner;
  ASSERT_TRUE(shard_->NextTick().has_value());
  PushAll(&b, round, 4.0f);
  EXPECT_GT(sooner, told);
  EXPECT_LE(*shard_->NextTick(), clock_.now + 10 * kMs);
  EXPECT_EQ(shard_->Describe(false, false).version(), round);
  clock_.now += 10 * kMs;
  shard_->Tick();
  const v1::JobStatus status = shard_->Describe(false, false);
  EXPECT_EQ(status.version(), round + 1);
  EXPECT_EQ(status.rounds().short_rounds(), 1u);
  EXPECT_EQ(status.rounds().members(), 3u);
  EXPECT_NEAR(status.rounds().deadline_ms(), 10, 0.1);
  EXPECT_NE(Digest(), before);
  a.FollowUpdate(round + 1);  // of two contributors
  // What is left of the late frame is answered, not merged: with its last chunk, which asks for the update.
  const auto chunks = c.frames.Push(large, round, 100.0f);
  ASSERT_GT(chunks.size(), 2u);
  absl::StatusOr<std::optional<v1::PushAck>> ack;
  for (size_t i = 1; i < chunks.size(); ++i) {
    ack = shard_->PushChunk(c.stream, {&chunks[i], 1});
    ASSERT_TRUE(ack.ok());
    ASSERT_EQ(ack->has_value(), i + 1 == chunks.size()) << i;
  }
  EXPECT_EQ((*ack)->outcome(), v1::PUSH_NOT_INCLUDED);
  EXPECT_EQ((*ack)->open_round(), round + 1);
}

// Only that update says which elements come back, be it none: without it the worker could not go on.
TEST_F(JobShardTest, AWorkerThatWasAwayFindsTheSparseUpdateThatItIsIn) {
  Start(SmallSpec("job", 2, "tagc:density=0.05"));
  TestWorker a = Worker("a"), b = Worker("b");
  StartTwo(&a, &b);
  PushAll(&a, 1, 1.0f);
  PushAll(&b, 1, 1.0f);
  a.FollowUpdate(2);
  clock_.now += 5'000 * kMs;
  ASSERT_TRUE(shard_->Heartbeat(a.HeartbeatRequest()).ok());
  clock_.now += 6'000 * kMs;
  shard_->Tick();
  for (uint64_t round = 2; round < 5; ++round) {
    PushAll(&a, round, 1.0f);
    a.FollowUpdate(round + 1);
  }
  const auto back = shard_->Resume(b.identity, {.round = 1});
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_NE(back->start_version(), 1u);
  b.pull = std::make_shared<RecordingStream>();
  b.out = std::make_shared<Outbox>(b.pull);
  ASSERT_TRUE(shard_->Attach(b.identity, b.out).ok());
  for (const uint64_t version : {2u, 3u}) {
    b.Pull(v1::PULL_UPDATE, version);
    const auto answers = b.TakeAnswers();
    ASSERT_EQ(answers.size(), b.frames.buckets());
    for (const Answered& answer : answers) EXPECT_EQ(answer.control.code() == 0, version == 2) << version;
  }
  const auto lost = shard_->CatchUp(b.identity, {.round = 6}, 0);  // the worker has seen what is not here
  EXPECT_EQ(lost.status().code(), absl::StatusCode::kDataLoss) << lost.status();
  const auto caught = shard_->CatchUp(b.identity, {.round = 2}, 0);
  ASSERT_TRUE(caught.ok()) << caught.status();
  EXPECT_EQ(caught->start_version(), 6u);
}

TEST_F(JobShardTest, LeaseEndAbandonsThePartialFrameAndTheOthersGoOn) {
  v1::JobSpec spec = SmallSpec("job", 2);
  spec.mutable_tensors(0)->set_shape(0, 4096);  // 1 MiB: more than one chunk
  spec.set_bucket_bytes(8 << 20);
  environment_.frame_limit_bytes = 16 << 20;
  Start(spec);
  TestWorker a = Worker("a"), b = Worker("b");
  StartTwo(&a, &b);
  for (uint32_t k = 0; k < a.frames.buckets(); ++k) {
    const auto chunks = b.frames.Push(k, 1, 100.0f);
    if (chunks.size() > 1) {
      const auto ack = shard_->PushChunk(b.stream, {&chunks[0], 1});
      ASSERT_TRUE(ack.ok() && !*ack);
    }
  }
  PushAll(&a, 1, 2.0f);
  clock_.now += 5'000 * kMs;
  ASSERT_TRUE(shard_->Heartbeat(a.HeartbeatRequest()).ok());
  clock_.now += 6'000 * kMs;
  shard_->Tick();
  EXPECT_EQ(b.pull->finished->code(), absl::StatusCode::kNotFound);
  a.Pull(v1::PULL_PARAMS_F32, 2);
  const auto answers = a.TakeAnswers();
  ASSERT_EQ(answers.size(), a.frames.buckets());
  for (const Answered& answer : answers) {
    const BucketLayout& layout = a.frames.at(answer.control.bucket());
    std::vector<float> values(layout.elements);
    ASSERT_TRUE(DecodeParameters(answer.chunks, a.frames.job(), layout, 2, {.parameter = values.data()}).ok());
    EXPECT_THAT(values, testing::Each(0.0f));  // 1 - 0.5 * 2: nothing of b's 100
  }
}

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
  EXPECT_THAT(ack.message(), testing::AllOf(HasSubstr("0.25"), HasSubstr("0.5 of worker 'a'"), HasSubstr("for longer")));
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
  EXPECT_EQ(a.shard->Acknowledge(a.stream.member, first, std::vector{static_cast<v1::PullKind>(77)}, a.out).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(JobShardTest, WhoWouldMixVersionsCannotJoin) {
  Start(SmallSpec("job", 1));
  TestWorker a = Worker("a");
  ASSERT_TRUE(a.Join().ok());
  a.InitializeAll(1.0f);
  for (uint64_t round = 0; round < 2; ++round) {
    PushAll(&a, round, 1.0f);
    a.FollowUpdate(round + 1);
  }
  // Another shard may have closed round 2 already, no later one.
  const auto joined = a.shard->Join(a.identity, 0, true, /*other_version=*/3);
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_EQ(joined->version(), 2u);
  const absl::Status refused = a.shard->Join(a.identity, 0, true, /*other_version=*/4).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("is at version 2, another shard is at version 4"), HasSubstr("gradwire restore")));
  EXPECT_EQ(a.shard->Describe(true, false).workers_size(), 0) << "who was refused is waited for by nobody";
  EXPECT_FALSE(a.shard->Unused()) << "it has parameters";
}

TEST_F(JobShardTest, OldVersionsAreOutOfRangeAndSayWhereToStart) {
  Start(SmallSpec("job", 1));
  TestWorker a = Worker("a");
  ASSERT_TRUE(a.Join().ok());
  a.InitializeAll(0.0f);
  for (uint64_t round = 0; round < 4; ++round) {
    PushAll(&a, round, 1.0f);
    a.FollowUpdate(round + 1);
  }
  a.Pull(v1::PULL_UPDATE, 3);
  for (const Answered& answer : a.TakeAnswers()) EXPECT_EQ(answer.control.code(), 0);
  a.Pull(v1::PULL_UPDATE, 2);
  for (const Answered& answer : a.TakeAnswers()) {
    EXPECT_EQ(answer.control.code(), static_cast<int>(absl::StatusCode::kOutOfRange));
    EXPECT_THAT(answer.control.message(), HasSubstr("start from version 4"));
  }
  a.Pull(v1::PULL_STATE, 3);
  for (const Answered& answer : a.TakeAnswers()) {
    EXPECT_EQ(answer.control.code(), static_cast<int>(absl::StatusCode::kOutOfRange));
  }
}

TEST_F(JobShardTest, DamagedChunkEndsTheStreamAndTheSameFrameCanFollow) {
  Start(SmallSpec("job", 2));
  TestWorker a = Worker("a"), b = Worker("b");
  StartTwo(&a, &b);
  const auto frame = a.frames.Push(0, 1, 1.0f);
  for (const size_t bit : {8 * (frame[0].size() - 1), size_t{8 * 16}}) {
    const Bytes flipped = FlipBit(frame[0], bit);
    EXPECT_EQ(shard_->PushChunk(a.stream, {&flipped, 1}).status().code(), absl::StatusCode::kDataLoss);
  }
  EXPECT_EQ(a.Push(frame).outcome(), v1::PUSH_INCLUDED) << "the round has waited for it";
}

TEST_F(JobShardTest, AbstainingWorkerIsNotWaitedFor) {
  Start(SmallSpec("job", 2));
  TestWorker a = Worker("a"), b = Worker("b");
  StartTwo(&a, &b);
  for (uint32_t k = 0; k < a.frames.buckets(); ++k) {
    EXPECT_EQ(a.Push(a.frames.Abstain(k, 1)).outcome(), v1::PUSH_INCLUDED);
  }
  PushAll(&b, 1, 1.0f);
  EXPECT_EQ(shard_->Describe(false, false).version(), 2u);
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

TEST_F(JobShardTest, HugeTensorIsRefusedBeforeTheShardMapIsMade) {
  if (environment_.device != nullptr) GTEST_SKIP() << "on a device, its memory is the limit";
  v1::JobSpec spec = SmallSpec("job", 1);
  v1::TensorSpec* tensor = spec.add_tensors();
  tensor->set_name("huge");
  tensor->add_shape(1'000'000);
  tensor->add_shape(1'000'000);
  const absl::Status status = JobShard::Make(spec, 0, 1, environment_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("parameters and moments of shard 0 of 1"));
  EXPECT_THAT(std::string(status.message()), HasSubstr(std::to_string(environment_.job_memory_limit_bytes)));
  // Where the limit would allow the parameters, the shard map is still too large.
  environment_.job_memory_limit_bytes = UINT64_MAX;
  const absl::Status map = JobShard::Make(spec, 0, 1, environment_).status();
  EXPECT_EQ(map.code(), absl::StatusCode::kResourceExhausted) << map;
  EXPECT_THAT(std::string(map.message()), HasSubstr("shard map"));
}

TEST_F(JobShardTest, ManyBucketsTimesManyShardsAreRefusedBeforeTheShardMapIsMade) {
  v1::JobSpec spec = SmallSpec("job", 1);
  spec.set_bucket_bytes(4 * spec.run_elements());  // a bucket per run
  v1::TensorSpec* tensor = spec.add_tensors();
  tensor->set_name("large");
  tensor->add_shape(uint64_t{spec.run_elements()} * 100'000);
  environment_.job_memory_limit_bytes = UINT64_MAX;
  const absl::Status status = JobShard::Make(spec, 0, 4096, environment_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("4096 shards"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("bucket_bytes"));
}

TEST_F(JobShardTest, MemoryOverTheLimitIsRefusedWithNumbers) {
  environment_.job_memory_limit_bytes = 10'000;
  const auto shard = JobShard::Make(SmallSpec("job", 1), 0, 1, environment_);
  EXPECT_EQ(shard.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(shard.status().message()), HasSubstr("10000"));
}

TEST_F(JobShardTest, SerializedPullsAreBoundedPerWorker) {
  Start(SmallSpec("job", 1));
  TestWorker a = Worker("a");
  ASSERT_TRUE(a.Join().ok());
  for (size_t i = 0; i <= MaxWaitersPerMember(a.frames.job()); ++i) a.Pull(v1::PULL_UPDATE, 5);
  const auto answers = a.TakeAnswers();
  ASSERT_EQ(answers.size(), a.frames.buckets());
  EXPECT_EQ(answers[0].control.code(), static_cast<int>(absl::StatusCode::kResourceExhausted));
}

// A worker whose connection broke resumes and pulls again, also where its server was told of no end of the old streams.
TEST_F(JobShardTest, PullsOfAnEarlierStreamGiveWay) {
  Start(SmallSpec("job", 2));
  TestWorker a = Worker("a"), b = Worker("b");
  StartTwo(&a, &b);
  const size_t most = MaxWaitersPerMember(a.frames.job());
  for (size_t i = 0; i < most; ++i) a.Pull(v1::PULL_UPDATE, 2);
  const auto old = a.pull;
  ASSERT_TRUE(old->sent.empty());
  a.pull = std::make_shared<RecordingStream>();
  a.out = std::make_shared<Outbox>(a.pull);
  ASSERT_TRUE(shard_->Attach(a.identity, a.out).ok());

  for (uint32_t bucket = 0; bucket < a.frames.buckets(); ++bucket) {
    v1::PushAck ack;
    ack.set_round(1);
    ack.set_bucket(bucket);
    ack.set_outcome(v1::PUSH_INCLUDED);
    a.Acknowledge(ack, {v1::PULL_UPDATE});
  }
  const auto acks = a.TakeAcks();
  ASSERT_EQ(acks.size(), a.frames.buckets());
  for (const v1::PushAck& ack : acks) {
    EXPECT_EQ(ack.outcome(), v1::PUSH_INCLUDED);
    EXPECT_EQ(ack.code(), 0) << ack.message();
    EXPECT_EQ(ack.kind(), v1::PULL_UNSPECIFIED);
  }
  for (size_t i = 1; i < most; ++i) a.Pull(v1::PULL_UPDATE, 2);
  EXPECT_TRUE(a.TakeAnswers().empty());
  EXPECT_EQ(old->sent.size(), most * a.frames.buckets());
  for (const transport::Message& refused : old->sent) {
    v1::PullMessage control;
    ASSERT_TRUE(control.ParseFromString(refused.control));
    EXPECT_EQ(control.code(), static_cast<int>(absl::StatusCode::kResourceExhausted));
  }
  a.Pull(v1::PULL_UPDATE, 2);  // no other stream has any left
  for (const Answered& answer : a.TakeAnswers()) {
    EXPECT_EQ(answer.control.code(), static_cast<int>(absl::StatusCode::kResourceExhausted));
  }

  PushAll(&a, 1, 1.0f);
  PushAll(&b, 1, 1.0f);
  EXPECT_EQ(a.pull->sent.size(), most * a.frames.buckets());
}

TEST_F(JobShardTest, MemoryCountsTheVersionThatAJoinerIsStillSent) {
  v1::JobSpec spec = SmallSpec("job", 2);
  spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_ADAMW);
  spec.mutable_tensors(0)->set_shape(0, 2'000);  // in one bucket, so that what is reserved for headers matters little
  spec.set_bucket_bytes(4 << 20);
  Start(spec);
  TestWorker a = Worker("a"), b = Worker("b");
  StartTwo(&a, &b);
  a.Pull(v1::PULL_STATE, 1);
  PushAll(&a, 1, 1.0f);
  PushAll(&b, 1, 1.0f);
  b.Pull(v1::PULL_STATE, 2);
  uint64_t kept = 0;
  for (TestWorker* worker : {&a, &b})
    for (const Answered& answer : worker->TakeAnswers()) kept += TotalSize(answer.chunks);
  EXPECT_LE(kept, shard_->memory().serialized);
  EXPECT_GT(kept, shard_->memory().serialized * 3 / 4);
}

TEST_F(JobShardTest, SanitizedElementsAreThoseThatWorkersTold) {
  Start(SmallSpec("job", 2));
  TestWorker a = Worker("a"), b = Worker("b");
  ASSERT_TRUE(a.Join().ok());
  ASSERT_TRUE(b.Join().ok());
  ASSERT_TRUE(shard_->Heartbeat(a.HeartbeatRequest(5)).ok());
  ASSERT_TRUE(shard_->Heartbeat(a.HeartbeatRequest(5)).ok());
  ASSERT_TRUE(shard_->Heartbeat(a.HeartbeatRequest(3)).ok());  // an old one, overtaken
  ASSERT_TRUE(shard_->Heartbeat(b.HeartbeatRequest(2)).ok());
  v1::JobStatus status = shard_->Describe(true, false);
  EXPECT_EQ(status.sanitized_elements(), 7u);
  ASSERT_EQ(status.workers_size(), 2);
  EXPECT_EQ(status.workers(0).sanitized_elements(), 5u);
  ASSERT_TRUE(shard_->Leave(a.LeaveRequest(9)).ok());
  TestWorker later = Worker("a", 2);
  ASSERT_TRUE(later.Join().ok());
  ASSERT_TRUE(shard_->Heartbeat(later.HeartbeatRequest(1)).ok());
  EXPECT_EQ(shard_->Describe(false, false).sanitized_elements(), 12u);
}

TEST_F(JobShardTest, ShutEndsStreamsAndRefusesWhatFollows) {
  Start(SmallSpec("job", 1));
  TestWorker a = Worker("a");
  ASSERT_TRUE(a.Join().ok());
  shard_->Shut(absl::AbortedError("job 'job' was deleted"));
  EXPECT_EQ(a.pull->finished->code(), absl::StatusCode::kAborted);
  const Bytes initial = a.frames.Initialize(0, 1.0f)[0];
  EXPECT_EQ(shard_->PushChunk(a.stream, {&initial, 1}).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(a.Join().status().code(), absl::StatusCode::kAborted);
}

// Keeps what it is given until the test lets it be seen.
class HeldSink final : public UpdateSink {
 public:
  void Append(journal::Record record, std::function<void()> visible) override {
    records.push_back(std::move(record));
    held.push_back(std::move(visible));
  }
  void Stop() override {}
  journal::JournalStatus status() const override { return {}; }
  void SnapshotTaken(uint64_t, uint64_t) override {}
  void Release() {
    const std::vector<std::function<void()>> now = std::move(held);
    held.clear();
    for (const auto& visible : now) visible();
  }
  std::vector<journal::Record> records;
  std::vector<std::function<void()>> held;
};

TEST_F(JobShardTest, NothingIsSeenBeforeItsRecordIsWritten) {
  Start(SmallSpec("job", 2));
  auto owned = std::make_unique<HeldSink>();
  HeldSink& sink = *owned;
  shard_->SetSink(std::move(owned));
  TestWorker a = Worker("a"), b = Worker("b");
  ASSERT_TRUE(a.Join().ok());
  ASSERT_TRUE(b.Join().ok());
  b.Pull(v1::PULL_PARAMS_F32, 0);
  for (uint32_t bucket = 0; bucket < a.frames.buckets(); ++bucket) a.PushUnanswered(a.frames.Initialize(bucket, 1.0f));
  EXPECT_TRUE(b.TakeAnswers().empty());
  EXPECT_TRUE(a.TakeAcks().empty());
  sink.Release();
  EXPECT_EQ(b.TakeAnswers().size(), b.frames.buckets());
  EXPECT_EQ(a.TakeAcks().size(), a.frames.buckets());
  PushAll(&a, 0, 1.0f);
  PushAll(&b, 0, 1.0f);
  a.Pull(v1::PULL_UPDATE, 1);
  b.Pull(v1::PULL_STATE, 1);
  EXPECT_TRUE(a.TakeAnswers().empty());
  EXPECT_TRUE(b.TakeAnswers().empty());
  EXPECT_EQ(shard_->Describe(false, false).version(), 0u);
  ASSERT_EQ(sink.held.size(), a.frames.buckets());
  sink.held.back()();  // of one bucket
  sink.held.pop_back();
  EXPECT_EQ(a.TakeAnswers().size(), 1u);
  EXPECT_EQ(shard_->Describe(false, false).version(), 0u);
  sink.Release();
  EXPECT_EQ(a.TakeAnswers().size(), a.frames.buckets() - 1);
  EXPECT_EQ(shard_->Describe(false, false).version(), 1u);
  // The record says whose frames it contains.
  const journal::Record& last = sink.records.back();
  ASSERT_EQ(last.contributions.size(), 2u);
  for (const journal::Contribution& c : last.contributions) {
    EXPECT_TRUE(c.included);
    EXPECT_EQ(c.member, MakeMemberId(c.worker, c.incarnation));
    EXPECT_NE(c.digest, 0u);
  }
}

v1::JobSpec TwoWaySpec() {
  v1::JobSpec spec = SmallSpec("job", 2);
  spec.set_update_codec("topk:density=0.02,values=fp16");
  return spec;
}

// Everything that the shard has of a bucket, the residual of its update codec as well, and its last updates.
std::vector<Bytes> AllOf(JobShard& shard, uint32_t bucket) {
  const auto records = shard.CopyBucket(bucket);
  EXPECT_TRUE(records.ok()) << records.status();
  std::vector<Bytes> all;
  for (const journal::Record& record : *records) all.insert(all.end(), record.chunks.begin(), record.chunks.end());
  return all;
}

void ExpectSameBytes(const std::vector<Bytes>& a, const std::vector<Bytes>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(std::ranges::equal(a[i].span(), b[i].span())) << "chunk " << i;
}

TEST_F(JobShardTest, UpdatesAreCompressedOnceAndASlowWorkerIsSentThoseOfItsRound) {
  if (environment_.device != nullptr) {
    const absl::Status refused = JobShard::Make(TwoWaySpec(), 0, 1, environment_).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kUnimplemented);
    EXPECT_THAT(std::string(refused.message()), HasSubstr("--backend=cpu"));
    return;
  }
  Start(TwoWaySpec());
  TestWorker a = Worker("a"), b = Worker("b");
  StartTwo(&a, &b);
  PushAll(&a, 1, 1.0f);
  PushAll(&b, 1, 3.0f);
  a.Pull(v1::PULL_UPDATE, 2);
  const auto to_a = a.TakeAnswers();
  a.FollowUpdate(2);
  PushAll(&a, 2, 0.5f);  // the slow one has not asked for its update of round 1 yet
  b.Pull(v1::PULL_UPDATE, 2);
  const auto to_b = b.TakeAnswers();
  b.FollowUpdate(2);
  PushAll(&b, 2, 0.5f);
  b.Pull(v1::PULL_UPDATE, 2);
  const auto again = b.TakeAnswers();
  ASSERT_EQ(to_a.size(), a.frames.buckets());
  for (size_t k = 0; k < to_a.size(); ++k) {
    EXPECT_EQ(to_a[k].chunks[0].data(), to_b[k].chunks[0].data());  // not even copied
    EXPECT_EQ(to_a[k].chunks[0].data(), again[k].chunks[0].data());
    const BucketLayout& layout = a.frames.at(to_a[k].control.bucket());
    const auto update = DecodeUpdate(to_a[k].chunks, a.frames.job(), layout, {});
    ASSERT_TRUE(update.ok()) << update.status();
    EXPECT_EQ(update->body, Update::Body::kSparseFloat);
    EXPECT_GT(update->positions.size(), 0u);
    EXPECT_LT(update->positions.size(), layout.elements / 25);  // of all, which the workers sent
  }
  EXPECT_EQ(shard_->Describe(true, false).version(), 3u);
}

TEST_F(JobShardTest, TheResidualOfTheUpdateCodecIsInRecordsSnapshotsAndCopies) {
  if (environment_.device != nullptr) GTEST_SKIP() << "update codecs are refused on a device";
  Start(TwoWaySpec());
  auto owned = std::make_unique<HeldSink>();
  HeldSink& sink = *owned;
  shard_->SetSink(std::move(owned));
  TestWorker a = Worker("a"), b = Worker("b");
  ASSERT_TRUE(a.Join().ok());
  ASSERT_TRUE(b.Join().ok());
  for (uint32_t bucket = 0; bucket < a.frames.buckets(); ++bucket) a.PushUnanswered(a.frames.Initialize(bucket, 1.0f));
  sink.Release();
  a.TakeAcks();
  const auto round = [&](uint64_t r) {
    PushAll(&a, r, 0.5f + static_cast<float>(r));
    PushAll(&b, r, 1.5f);
    sink.Release();
    a.FollowUpdate(r + 1);
    b.FollowUpdate(r + 1);
  };
  for (uint64_t r = 0; r < 4; ++r) round(r);
  const auto capture = *shard_->NewCapture();
  ASSERT_EQ(shard_->Capture(capture, absl::Seconds(1)), absl::OkStatus());
  const ShardState snapshot = capture->state;
  EXPECT_EQ(snapshot.version, 4u);
  for (const ShardState::Bucket& bucket : snapshot.buckets) {
    EXPECT_THAT(bucket.update_residual, testing::Contains(testing::Ne(0.0f)));
  }
  for (uint64_t r = 4; r < 7; ++r) round(r);
  const auto read = [&sink](const JobShard::RecordVisitor& visit) -> absl::Status {
    for (const journal::Record& record : sink.records) {
      // As it comes back from a file.
      const journal::EncodedRecord encoded = journal::EncodeRecord(record, 1, 0);
      std::vector<uint8_t> bytes;
      for (const auto piece : encoded.Pieces()) bytes.insert(bytes.end(), piece.begin(), piece.end());
      const auto header = journal::DecodeRecordHeader(std::span(bytes).first(journal::kRecordHeaderBytes));
      if (!header.ok()) return header.status();
      const Bytes all = Bytes::FromVector(bytes);
      auto decoded = journal::DecodeRecordBody(
          *header, all.Slice(journal::kRecordHeaderBytes, bytes.size() - journal::kRecordHeaderBytes));
      if (!decoded.ok()) return decoded.status();
      if (const absl::Status status = visit(*std::move(decoded)); !status.ok()) return status;
    }
    return absl::OkStatus();
  };
  const ShardState* const none = nullptr;
  for (const ShardState* from : {none, &snapshot}) {
    SCOPED_TRACE(from == nullptr ? "from the journal" : "from the snapshot");
    const auto recovered = JobShard::Make(spec_, 0, 1, environment_);
    ASSERT_TRUE(recovered.ok()) << recovered.status();
    const absl::Status status = (*recovered)->Recover(from, read);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ((*recovered)->Describe(false, true).parameters_sha256(), Digest());
    for (uint32_t bucket = 0; bucket < a.frames.buckets(); ++bucket) {
      ExpectSameBytes(AllOf(**recovered, bucket), AllOf(*shard_, bucket));
    }
  }
  // A standby that begins with the copies has the same.
  const auto standby = JobShard::Make(spec_, 0, 1, environment_);
  ASSERT_TRUE(standby.ok()) << standby.status();
  const absl::Status copied = (*standby)->Recover(none, [&](const JobShard::RecordVisitor& visit) {
    absl::Status status;
    for (uint32_t bucket = 0; bucket < a.frames.buckets() && status.ok(); ++bucket) {
      const auto records = shard_->CopyBucket(bucket);
      if (!records.ok()) return records.status();
      for (const journal::Record& record : *records) status.Update(visit(record));
    }
    return status;
  });
  ASSERT_TRUE(copied.ok()) << copied;
  for (uint32_t bucket = 0; bucket < a.frames.buckets(); ++bucket) {
    ExpectSameBytes(AllOf(**standby, bucket), AllOf(*shard_, bucket));
  }
}

TEST_F(JobShardTest, InitialParametersThatComeAgainAreAcknowledgedOnceTheyAreWritten) {
  Start(SmallSpec("job", 1));
  auto owned = std::make_unique<HeldSink>();
  HeldSink& sink = *owned;
  shard_->SetSink(std::move(owned));
  TestWorker a = Worker("a");
  ASSERT_TRUE(a.Join().ok());
  a.PushUnanswered(a.frames.Initialize(0, 1.0f));
  const std::shared_ptr<RecordingStream> first = a.pull;
  a.out->Close();
  shard_->AbandonStream(a.stream);
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
  auto owned = std::make_unique<HeldSink>();
  HeldSink& sink = *owned;
  shard_->SetSink(std::move(owned));
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

TEST_F(JobShardTest, RegistryTellsWhichFieldDiffers) {
  JobRegistry registry(environment_, {.memory_bytes = 1 << 28, .max_jobs = 1});
  v1::JobSpec spec = SmallSpec("job", 1);
  ASSERT_TRUE(registry.GetOrCreate(spec, 0, 2, 0).ok());
  EXPECT_TRUE(registry.GetOrCreate(spec, 0, 2, 0).ok());
  EXPECT_THAT(std::string(registry.GetOrCreate(spec, 1, 2, 0).status().message()), HasSubstr("shard 0 of 2"));
  EXPECT_THAT(std::string(registry.GetOrCreate(spec, 0, 2, 77).status().message()), HasSubstr("digest"));
  spec.mutable_tensors(1)->set_shape(0, 17);
  const auto other = registry.GetOrCreate(spec, 0, 2, 0);
  EXPECT_EQ(other.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(other.status().message()), HasSubstr("tensors[1].shape[0] is 16 here, 17 asked for"));
  EXPECT_EQ(registry.GetOrCreate(SmallSpec("second", 1), 0, 1, 0).status().code(),
            absl::StatusCode::kResourceExhausted);
  ASSERT_TRUE(registry.Delete("job").ok());
  EXPECT_EQ(registry.Find("job").status().code(), absl::StatusCode::kNotFound);
  registry.Drain();
  EXPECT_EQ(registry.GetOrCreate(SmallSpec("second", 1), 0, 1, 0).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace gradwire

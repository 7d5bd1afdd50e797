// One job without a transport: frames in, acknowledgements and updates out, under a clock that the test moves.
#include "server/job/job_shard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "common/codec/frame/parameters.h"
#include "server/rounds/lateness.h"
#include "tests/unit/server/job_shard_fixture.h"

namespace gradwire {
namespace {

using testing::HasSubstr;
using testing_support::Answered;
using testing_support::JobShardTest;
using testing_support::kMs;
using testing_support::RecordingStream;
using testing_support::SmallSpec;
using testing_support::TestWorker;

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
    const auto ack = shard_->intake().Take(c.stream, {&chunks[0], 1});
    ASSERT_TRUE(ack.ok() && !*ack);
  }
  const int told = sooner;
  ASSERT_TRUE(shard_->NextTick().has_value());
  PushAll(&b, round, 4.0f);
  EXPECT_GT(sooner, told);
  EXPECT_LE(*shard_->NextTick(), clock_.now + 10 * kMs);
  EXPECT_EQ(shard_->Describe(false, false).version(), round);
  clock_.now += 10 * kMs;
  shard_->Tick(clock_.now);
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
    ack = shard_->intake().Take(c.stream, {&chunks[i], 1});
    ASSERT_TRUE(ack.ok());
    ASSERT_EQ(ack->has_value(), i + 1 == chunks.size()) << i;
  }
  EXPECT_EQ((*ack)->outcome(), v1::PUSH_NOT_INCLUDED);
  EXPECT_EQ((*ack)->open_round(), round + 1);
}

// What came meanwhile is read before the ticker has run, frame by frame.
TEST_F(JobShardTest, FramesThatCameWhileThisProcessWasStoppedAreInTime) {
  v1::JobSpec spec = SmallSpec("job", 4);
  spec.mutable_rounds()->set_quorum(2);
  TimeNs slept = 0;
  environment_.slept = [&slept](TimeNs) { return slept; };
  Start(spec);
  TestWorker a = Worker("a"), b = Worker("b"), c = Worker("c"), d = Worker("d");
  for (TestWorker* worker : {&a, &b, &c, &d}) ASSERT_TRUE(worker->Join().ok());
  a.InitializeAll(1.0f);
  for (TestWorker* worker : {&a, &b, &c, &d}) PushAll(worker, 0, 1.0f);
  uint64_t round = 1;
  for (; round <= Lateness::kFewest; ++round) {
    for (TestWorker* worker : {&a, &b, &d}) PushAll(worker, round, 1.0f);
    clock_.now += 10 * kMs;
    PushAll(&c, round, 1.0f);
    clock_.now += 100 * kMs;
  }
  for (TestWorker* worker : {&a, &b}) PushAll(worker, round, 1.0f);
  clock_.now += 2'000 * kMs;
  slept = 1'995 * kMs;
  PushAll(&c, round, 1.0f);
  EXPECT_EQ(shard_->Describe(false, false).version(), round);
  shard_->Tick(clock_.now, nullptr, slept);
  EXPECT_EQ(shard_->Describe(false, false).version(), round) << "5 ms are left";
  slept = 0;
  clock_.now += 5 * kMs;
  shard_->Tick(clock_.now);
  EXPECT_EQ(shard_->Describe(false, false).version(), round + 1) << "what was excused once is not excused again";
}

// Only that update says which elements come back, be it none: without it the worker could not go on.
TEST_F(JobShardTest, AWorkerThatWasAwayFindsTheUpdateThatItsSketchIsIn) {
  Start(SmallSpec("job", 2, "tagc:density=0.05,form=sketch"));
  TestWorker a = Worker("a"), b = Worker("b");
  StartTwo(&a, &b);
  PushAll(&a, 1, 1.0f);
  PushAll(&b, 1, 1.0f);
  a.FollowUpdate(2);
  clock_.now += 5'000 * kMs;
  ASSERT_TRUE(shard_->Heartbeat(a.HeartbeatRequest()).ok());
  clock_.now += 6'000 * kMs;
  shard_->Tick(clock_.now);
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
      const auto ack = shard_->intake().Take(b.stream, {&chunks[0], 1});
      ASSERT_TRUE(ack.ok() && !*ack);
    }
  }
  PushAll(&a, 1, 2.0f);
  clock_.now += 5'000 * kMs;
  ASSERT_TRUE(shard_->Heartbeat(a.HeartbeatRequest()).ok());
  clock_.now += 6'000 * kMs;
  shard_->Tick(clock_.now);
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

// Fails as where memory runs out.
class ExhaustedStream final : public transport::Stream {
 public:
  absl::Status Send(transport::Message) override { return absl::OkStatus(); }
  void Finish(absl::Status) override { throw std::bad_alloc(); }
  void Cancel() override {}
};

TEST_F(JobShardTest, TheRoundOfAMemberThatCannotBeToldOfItsEndGoesOn) {
  Start(SmallSpec("job", 2));
  TestWorker a = Worker("a"), b = Worker("b");
  StartTwo(&a, &b);
  const auto out = std::make_shared<Outbox>(std::make_shared<ExhaustedStream>());
  ASSERT_TRUE(shard_->Attach(b.identity, out).ok());
  PushAll(&a, 1, 2.0f);
  clock_.now += 5'000 * kMs;
  ASSERT_TRUE(shard_->Heartbeat(a.HeartbeatRequest()).ok());
  clock_.now += 6'000 * kMs;
  EXPECT_NO_THROW(shard_->Tick(clock_.now));
  EXPECT_EQ(shard_->Describe(false, false).version(), 2u);
  out->Close();  // waits for nobody
}

TEST_F(JobShardTest, OfTwoProcessesWithOneCheckpointOneGoesOn) {
  Start(SmallSpec("job", 2));
  TestWorker a = Worker("a"), b = Worker("b");
  a.identity.set_session(100);
  StartTwo(&a, &b);
  const Rounds::ResumePoint here{.round = 1};
  v1::WorkerIdentity copy = a.identity;
  copy.set_session(200);
  EXPECT_TRUE(absl::IsAlreadyExists(shard_->Resume(copy, here).status())) << "the first is connected";
  shard_->Detach(a.stream.member, a.out);
  ASSERT_TRUE(shard_->Resume(copy, here).ok());
  EXPECT_TRUE(absl::IsNotFound(shard_->Heartbeat(a.HeartbeatRequest()).status()));
  // The copy gives up where it has not begun: the first one comes back.
  ASSERT_TRUE(shard_->Resume(a.identity, here).ok());
  EXPECT_TRUE(shard_->Heartbeat(a.HeartbeatRequest()).ok());
  ASSERT_TRUE(shard_->Resume(copy, here).ok());
  ASSERT_TRUE(shard_->Attach(copy, std::make_shared<Outbox>(std::make_shared<RecordingStream>())).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(shard_->Heartbeat(a.HeartbeatRequest()).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(shard_->Resume(a.identity, here).status()));
  v1::LeaveRequest leave;
  *leave.mutable_identity() = copy;
  ASSERT_TRUE(shard_->Leave(leave).ok());
  // It has sent what the first one has in its residual.
  EXPECT_TRUE(absl::IsFailedPrecondition(shard_->Resume(a.identity, here).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(shard_->CatchUp(a.identity, here, 0).status()));
  copy.set_session(300);  // started again from the checkpoint
  EXPECT_TRUE(shard_->Resume(copy, here).ok());
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
              AllOf(HasSubstr("is at version 2, another shard is at version 4"), HasSubstr("exist=\"new\"")))
      << "where nothing was written nothing can be restored";
  EXPECT_EQ(a.shard->Describe(true, false).workers_size(), 0) << "who was refused is waited for by nobody";
  EXPECT_FALSE(a.shard->Unused()) << "it has parameters";
}

TEST_F(JobShardTest, WhoWouldMixVersionsOfADurableJobIsToldHowToRestoreIt) {
  v1::JobSpec spec = SmallSpec("job", 1);
  spec.mutable_durability()->set_level(v1::DURABILITY_FSYNC);
  Start(spec);
  TestWorker a = Worker("a");
  const absl::Status refused = a.shard->Join(a.identity, 0, true, /*other_version=*/4).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("gradwire restore"));
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
  for (const v1::PullKind kind : {v1::PULL_UPDATE, v1::PULL_PLAN}) {
    for (int time = 0; time < 2; ++time) {
      a.Pull(kind, 3);
      const std::vector<Answered> answers = a.TakeAnswers();
      ASSERT_FALSE(answers.empty());
      for (const Answered& answer : answers) {
        EXPECT_EQ(answer.control.code(), 0) << answer.control.message();
        EXPECT_EQ(answer.control.kind(), kind);
      }
    }
    a.Pull(kind, 2);
    for (const Answered& answer : a.TakeAnswers()) {
      EXPECT_EQ(answer.control.code(), static_cast<int>(absl::StatusCode::kOutOfRange));
      EXPECT_THAT(answer.control.message(), HasSubstr("start from version 4"));
    }
  }
  a.Pull(v1::PULL_STATE, 3);
  for (const Answered& answer : a.TakeAnswers()) {
    EXPECT_EQ(answer.control.code(), static_cast<int>(absl::StatusCode::kOutOfRange));
  }
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
  EXPECT_EQ(shard_->intake().Take(a.stream, {&initial, 1}).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(a.Join().status().code(), absl::StatusCode::kAborted);
}

}  // namespace
}  // namespace gradwire

// Memory of a job and what is kept for its pullers are bounded, and refused with what they would need.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "tests/unit/server/job_shard_fixture.h"

namespace gradwire {
namespace {

using testing::HasSubstr;
using testing_support::Answered;
using testing_support::JobShardTest;
using testing_support::RecordingStream;
using testing_support::SmallSpec;
using testing_support::TestWorker;

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

}  // namespace
}  // namespace gradwire

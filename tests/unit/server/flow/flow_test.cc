// The two flows: when a frame is merged, and what is open for the next one.
#include "server/flow/flow.h"

#include <gtest/gtest.h>

#include "tests/unit/server/test_job.h"

namespace gradwire {
namespace {

using testing_support::SmallSpec;
using testing_support::TestJob;
using testing_support::TestMember;

v1::JobSpec AsyncSpec() {
  v1::JobSpec spec = SmallSpec("job", 1);
  spec.mutable_rounds()->set_mode(v1::ROUNDS_ASYNC);
  spec.mutable_rounds()->set_staleness(3);
  return spec;
}

// The beginning of the member's frame of round 0 in bucket 0: all of it, but not said to be the last chunk.
void Begin(TestJob& job, TestMember& member, std::vector<uint8_t>* scratch) {
  Flow& flow = *job.by_rounds().flow;
  BucketState& bucket = job.bucket(0);
  const Bytes bytes = job.frames().Push(0, 0, 1.0f)[0];
  absl::StatusOr<wire::Chunk> chunk = wire::ParseReceived({&bytes, 1}, scratch);
  ASSERT_TRUE(chunk.ok());
  absl::MutexLock lock(&bucket.mu);
  OpenRound* const open = flow.PlaceOf(bucket, 0);
  ASSERT_TRUE(flow.Begin(bucket, open, member.stream, chunk->header).ok());
  EXPECT_TRUE(open->partial.contains(member.id));
}

TEST(RoundFlow, MergesAFrameWithOthersAndClosesWithTheLast) {
  TestJob job(SmallSpec("job", 2));
  const auto a = job.Join("a"), b = job.Join("b", 2);
  job.Initialize(*a, 1.0f);
  job.Merge(*a, 0, 0, 1.0f);
  EXPECT_TRUE(job.decided.close.empty());
  job.Merge(*b, 0, 0, 2.0f);
  ASSERT_EQ(job.decided.close.size(), 1u);
  EXPECT_EQ(job.decided.close[0].contributors, 2u);
  absl::MutexLock lock(&job.bucket(0).mu);
  EXPECT_EQ(job.bucket(0).Find(0)->committed, 2u);
  EXPECT_EQ(job.parts().in_flight.bytes(), 0u);
}

TEST(RoundFlow, WhatIsNotWholeWhenTheRoundClosesIsTakenOutAgain) {
  TestJob job(SmallSpec("job", 1));
  const auto a = job.Join("a");
  job.Initialize(*a, 1.0f);
  std::vector<uint8_t> scratch;
  Begin(job, *a, &scratch);
  ClosedBucket closed;
  closed.bucket = &job.bucket(0);
  EXPECT_EQ(job.by_rounds().flow->Finish(&closed), absl::OkStatus());
  EXPECT_FALSE(closed.update.chunks.empty());
  EXPECT_EQ(closed.plan_version, 0u);
  absl::MutexLock lock(&job.bucket(0).mu);
  EXPECT_TRUE(job.bucket(0).Find(0)->partial.empty());
}

TEST(RoundFlow, OpensAsManyRoundsAsMayBeOpenAndHaveTheirPlan) {
  v1::JobSpec spec = SmallSpec("job", 1);
  spec.mutable_rounds()->set_mode(v1::ROUNDS_BOUNDED);
  spec.mutable_rounds()->set_staleness(2);
  TestJob job(spec);
  BucketState& bucket = job.bucket(0);
  absl::MutexLock lock(&bucket.mu);
  EXPECT_NE(bucket.Find(0), nullptr);
  EXPECT_EQ(bucket.Find(1), nullptr) << "by the plan of version 1, which round 0 makes";
  bucket.plans.Push(bucket.codec->InitialPlan());
  ++bucket.version;
  job.by_rounds().flow->OpenNext(bucket);
  for (uint64_t round : {1, 2, 3}) EXPECT_NE(bucket.Find(round), nullptr) << round;
  EXPECT_EQ(bucket.Find(0), nullptr);
  EXPECT_EQ(bucket.Find(4), nullptr);
}

TEST(AsyncFlow, AFrameIsMergedAloneAndMakesAVersion) {
  TestJob job(AsyncSpec());
  const auto a = job.Join("a");
  job.Initialize(*a, 1.0f);
  std::vector<uint8_t> scratch;
  {
    BucketState& bucket = job.bucket(0);
    absl::MutexLock lock(&bucket.mu);
    EXPECT_EQ(bucket.open[0].round, OpenRound::kNone);
  }
  job.Merge(*a, 0, 0, 1.0f);
  ASSERT_EQ(job.decided.close.size(), 1u);
  const Flow& flow = *job.by_rounds().flow;
  wire::FrameHeader header;
  EXPECT_EQ(flow.MadeBy(header, PushVerdict::kAccept, job.decided.last_closed()), 1u);
  EXPECT_EQ(flow.MadeBy(header, PushVerdict::kAccept, {}), 0u) << "an abstention makes none";
  EXPECT_EQ(flow.MadeBy(header, PushVerdict::kDuplicate, {}), 1u);
  EXPECT_EQ(flow.MadeBy(header, PushVerdict::kNotIncluded, {}), 1u) << "against which it lost";
  ClosedBucket closed;
  closed.bucket = &job.bucket(0);
  closed.close = job.decided.close[0];
  EXPECT_EQ(job.by_rounds().flow->Finish(&closed), absl::OkStatus());
  EXPECT_EQ(closed.plan_version, 0u) << "the version that it was computed on";
}

TEST(AsyncFlow, WhatIsNotWholeHoldsUpNobody) {
  TestJob job(AsyncSpec());
  const auto a = job.Join("a"), b = job.Join("b", 2);
  job.Initialize(*a, 1.0f);
  std::vector<uint8_t> scratch;
  Begin(job, *b, &scratch);
  job.Merge(*a, 0, 0, 1.0f);
  ClosedBucket closed;
  closed.bucket = &job.bucket(0);
  closed.close = job.decided.close.at(0);
  EXPECT_EQ(job.by_rounds().flow->Finish(&closed), absl::OkStatus());
  absl::MutexLock lock(&job.bucket(0).mu);
  EXPECT_TRUE(job.bucket(0).open[0].partial.contains(b->id)) << "it is still coming";
}

}  // namespace
}  // namespace gradwire

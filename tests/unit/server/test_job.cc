// See test_job.h.
#include "tests/unit/server/test_job.h"

#include <gtest/gtest.h>

#include "server/flow/flow.h"
#include "tests/unit/server/small_environment.h"

namespace gradwire::testing_support {

TestJob::TestJob(const v1::JobSpec& spec) : frames_(spec, 0, 1, 1) {
  JobEnvironment environment = SmallEnvironment(backend_.get(), &clock_);
  environment.tellers = nullptr;
  parts_ = std::move(*MakeJobParts(*Job::Make(spec), 0, 1, environment));
  by_rounds_ = MakeByRounds(parts_.get());
  parts_->run = [this](const RoundActions& actions) {
    decided.close.insert(decided.close.end(), actions.close.begin(), actions.close.end());
  };
  for (const auto& bucket : parts_->buckets) {
    absl::MutexLock lock(&bucket->mu);
    by_rounds_.flow->OpenNext(*bucket);
  }
}

std::unique_ptr<TestMember> TestJob::Join(const std::string& worker, uint64_t incarnation) {
  auto member = std::make_unique<TestMember>();
  absl::MutexLock lock(&parts_->mu);
  RoundActions actions;
  const auto joined = parts_->rounds->Join(worker, incarnation, 0, true, clock_.now, &actions);
  EXPECT_TRUE(joined.ok()) << joined.status();
  member->id = joined->id;
  member->stream.member = joined->id;
  member->stream.incarnation = incarnation;
  member->stream.worker = worker;
  member->stream.out = member->out;
  return member;
}

void TestJob::Initialize(const TestMember& member, float value) {
  for (const auto& bucket : parts_->buckets) {
    const uint32_t b = bucket->layout->bucket;
    absl::MutexLock lock(&bucket->mu);
    EXPECT_TRUE(bucket->store->Initialize(frames_.Initialize(b, value)).ok());
    bucket->ready = true;
    absl::MutexLock job_lock(&parts_->mu);
    parts_->rounds->Initialized(member.id, b, clock_.now, &decided);
  }
}

void TestJob::Merge(TestMember& member, uint32_t b, uint64_t round, float value) {
  Flow& flow = *by_rounds_.flow;
  BucketState& state = bucket(b);
  absl::MutexLock lock(&state.mu);
  OpenRound* const open = flow.PlaceOf(state, round);
  ASSERT_NE(open, nullptr);
  bool complete = false;
  std::vector<uint8_t> scratch;
  for (const Bytes& bytes : frames_.Push(b, round, value)) {
    const absl::StatusOr<wire::Chunk> chunk = wire::ParseReceived({&bytes, 1}, &scratch);
    ASSERT_TRUE(chunk.ok()) << chunk.status();
    if (chunk->header.chunk == 0) {
      const auto begun = flow.Begin(state, open, member.stream, chunk->header);
      ASSERT_TRUE(begun.ok()) << begun.status();
    }
    const auto taken = flow.Take(state, *open, member.stream, *chunk, {&bytes, 1}, &decided, &complete);
    ASSERT_TRUE(taken.ok()) << taken.status();
  }
  EXPECT_TRUE(complete);
}

ClosedBucket TestJob::Closed(uint32_t b) {
  ClosedBucket closed;
  closed.bucket = &bucket(b);
  closed.close = decided.close.at(0);
  return closed;
}

}  // namespace gradwire::testing_support

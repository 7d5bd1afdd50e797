#include "server/job/past_rounds.h"

#include <gtest/gtest.h>

#include "server/job/memory.h"
#include "tests/unit/server/test_job.h"

namespace gradwire {
namespace {

using testing_support::SmallSpec;
using testing_support::TestJob;

UpdateFrame UpdateOfRound(uint64_t round, bool skipped = false) {
  UpdateFrame update;
  update.chunks.push_back(Bytes::Copy(std::vector<uint8_t>(4, static_cast<uint8_t>(round))));
  update.skipped = skipped;
  return update;
}

// A job of one worker that is away and has contributed to the first rounds of bucket 0.
class PastRoundsTest : public testing::Test {
 protected:
  void Start(const v1::JobSpec& spec, uint64_t contributed = 10) {
    job_ = std::make_unique<TestJob>(spec);
    for (uint64_t round = 0; round < contributed; ++round) Contribute(round);
  }
  void Contribute(uint64_t round) {
    absl::MutexLock lock(&job_->parts().mu);
    job_->parts().rounds->RestoreContribution(MakeMemberId("away", 1), 0, round, 7);
  }
  PastRounds& past() { return *job_->by_rounds().past; }

  std::unique_ptr<TestJob> job_;
};

TEST_F(PastRoundsTest, UpdatesAreRetainedUpToTheirNumber) {
  Start(SmallSpec("job", 1));
  BucketState& bucket = job_->bucket(0);
  absl::MutexLock lock(&bucket.mu);
  for (uint64_t round = 0; round < 10; ++round) {
    ++bucket.version;
    past().Keep(bucket, UpdateOfRound(round), {});
  }
  const size_t most = RetainedUpdates(job_->parts().job);
  ASSERT_EQ(bucket.updates.size(), most);
  ASSERT_NE(bucket.UpdateOf(9), nullptr);
  EXPECT_EQ(bucket.UpdateOf(9)->frame->pieces().front().span()[0], 9);
  EXPECT_NE(bucket.UpdateOf(10 - most), nullptr);
  EXPECT_EQ(bucket.UpdateOf(10 - most - 1), nullptr);
  EXPECT_EQ(bucket.UpdateOf(10), nullptr) << "not made yet";
  EXPECT_TRUE(bucket.owed.empty()) << "a dense update says nothing that a worker has to return to its residual";
}

TEST_F(PastRoundsTest, SkippedRoundsAreOwedToWhoMayAsk) {
  Start(SmallSpec("job", 1), /*contributed=*/3);
  BucketState& bucket = job_->bucket(0);
  absl::MutexLock lock(&bucket.mu);
  for (uint64_t round = 0; round < 10; ++round) {
    ++bucket.version;
    past().Keep(bucket, UpdateOfRound(round, /*skipped=*/round == 2), {});
  }
  ASSERT_EQ(bucket.owed.size(), 1u);
  EXPECT_TRUE(bucket.owed.contains(3)) << "by the version that round 2 made";
  const std::vector<journal::Record> records = past().RecordsBefore(bucket, 9);
  ASSERT_FALSE(records.empty());
  EXPECT_EQ(records.back().round, 2u);
  EXPECT_EQ(records.back().type, journal::RecordType::kKept);
  EXPECT_EQ(records.back().chunks.size(), 1u);
  // It has contributed since: it does not ask for what is so long ago.
  Contribute(8);
  Contribute(9);
  past().RecordsBefore(bucket, 9);
  EXPECT_TRUE(bucket.owed.empty());
}

TEST_F(PastRoundsTest, ACopyIsTheStateAndTheUpdatesThatMadeIt) {
  Start(SmallSpec("job", 1));
  const auto member = job_->Join("a");
  job_->Initialize(*member, 1.0f);
  BucketState& bucket = job_->bucket(0);
  absl::MutexLock lock(&bucket.mu);
  for (uint64_t round = 0; round < 4; ++round) {
    ++bucket.version;
    past().Keep(bucket, UpdateOfRound(round), {{1, "a", 1, 5, true, round}});
  }
  const std::vector<journal::Record> records = past().CopyOf(bucket);
  ASSERT_GT(records.size(), bucket.updates.size());
  EXPECT_EQ(records[0].type, journal::RecordType::kState);
  EXPECT_EQ(records[0].round, 4u);
  EXPECT_TRUE(records[0].contributions.empty());
  EXPECT_EQ(records.back().type, journal::RecordType::kUpdate);
  EXPECT_EQ(records.back().round, 3u);
  EXPECT_EQ(records.back().contributions.size(), 1u);
}

TEST_F(PastRoundsTest, OfAsynchronousRoundsTheStateTellsWhichFramesAreInIt) {
  v1::JobSpec spec = SmallSpec("job", 1);
  spec.mutable_rounds()->set_mode(v1::ROUNDS_ASYNC);
  spec.mutable_rounds()->set_staleness(3);
  Start(spec);
  const auto member = job_->Join("a");
  job_->Initialize(*member, 1.0f);
  BucketState& bucket = job_->bucket(0);
  absl::MutexLock lock(&bucket.mu);
  bucket.version = 10;
  past().Keep(bucket, UpdateOfRound(9), {});
  EXPECT_TRUE(bucket.updates.empty());
  const std::vector<journal::Record> records = past().CopyOf(bucket);
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].type, journal::RecordType::kState);
  ASSERT_FALSE(records[0].contributions.empty());
  EXPECT_EQ(records[0].contributions.back().round, 9u);
  EXPECT_EQ(records[0].contributions.back().digest, 7u);
}

}  // namespace
}  // namespace gradwire

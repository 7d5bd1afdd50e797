#include "server/job/job_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "tests/unit/server/holding_sink.h"
#include "tests/unit/server/test_job.h"

namespace gradwire {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing_support::HoldingSink;
using testing_support::LoggedJob;
using testing_support::SetHoldingSink;
using testing_support::SmallSpec;
using testing_support::TestMember;

v1::JobSpec DurableSpec(v1::DiskFailurePolicy on_failure = v1::DISK_FAILURE_WAIT) {
  v1::JobSpec spec = SmallSpec("job", 1);
  spec.mutable_durability()->set_level(v1::DURABILITY_FSYNC);
  spec.mutable_durability()->set_on_failure(on_failure);
  return spec;
}

// A job of two buckets, and its log.
class JobLogTest : public testing::Test {
 protected:
  explicit JobLogTest(const v1::JobSpec& spec = DurableSpec()) : job_(spec), member_(job_.Join("a")) {}

  // The worker's frame of the round closes bucket 0; nothing is applied.
  ClosedBucket Close(uint64_t round) {
    job_.decided.close.clear();
    job_.Merge(*member_, 0, round, 1.0f);
    ClosedBucket closed = job_.Closed(0);
    EXPECT_EQ(job_.by_rounds().flow->Finish(&closed), absl::OkStatus());
    return closed;
  }
  v1::JobStatus Describe(uint64_t version, uint64_t recovered) {
    v1::JobStatus status;
    log_.Describe(version, recovered, &status);
    return status;
  }

  LoggedJob job_;
  JobLog& log_ = job_.log;
  const std::unique_ptr<TestMember> member_;
};

TEST_F(JobLogTest, WithoutASinkNothingIsKeptAndNothingCanBeLost) {
  EXPECT_FALSE(log_.journals());
  EXPECT_EQ(log_.Bytes(), 0u);
  EXPECT_FALSE(log_.WantsSnapshot());
  EXPECT_EQ(log_.Unsafe(), absl::OkStatus());
  EXPECT_THAT(log_.SafeVersions(), ElementsAre(UINT64_MAX, UINT64_MAX)) << "all may be seen";
  log_.CutBehind(7, 7);
  log_.Stop();
  const v1::JobStatus status = Describe(7, 0);
  EXPECT_EQ(status.durability().level(), v1::DURABILITY_FSYNC);
  EXPECT_EQ(status.durability().durable_version(), 0u);
  EXPECT_THAT(status.followers(), IsEmpty());
}

TEST_F(JobLogTest, WhatIsThereWhenTheSinkComesIsSafe) {
  for (const uint32_t b : {0, 1}) {
    absl::MutexLock lock(&job_.bucket(b).mu);
    job_.bucket(b).version = 3 + b;
  }
  HoldingSink& sink = SetHoldingSink(log_);
  EXPECT_TRUE(log_.journals());
  EXPECT_THAT(log_.SafeVersions(), ElementsAre(3, 4));
  {
    absl::MutexLock lock(&job_.bucket(0).mu);
    ++job_.bucket(0).version;
  }
  EXPECT_THAT(log_.SafeVersions(), ElementsAre(3, 4)) << "its record may be lost";
  EXPECT_FALSE(sink.stopped);
  log_.Stop();
  EXPECT_TRUE(sink.stopped);
}

TEST_F(JobLogTest, ASnapshotIsWantedWhereRecordsAreMissingAndTheDiskIsWell) {
  HoldingSink& sink = SetHoldingSink(log_);
  sink.state.bytes = 77;
  EXPECT_EQ(log_.Bytes(), 77u);
  EXPECT_FALSE(log_.WantsSnapshot());
  sink.state.hole = true;
  EXPECT_TRUE(log_.WantsSnapshot());
  sink.state.degraded = true;
  EXPECT_FALSE(log_.WantsSnapshot());
  EXPECT_EQ(log_.Unsafe(), absl::OkStatus()) << "rounds wait for the disk";
}

class ContinuingJobLogTest : public JobLogTest {
 protected:
  ContinuingJobLogTest() : JobLogTest(DurableSpec(v1::DISK_FAILURE_CONTINUE)) {}
};

TEST_F(ContinuingJobLogTest, WhatGoesOnWithoutItsJournalIsUnsafeUntilASnapshotMakesUpForIt) {
  HoldingSink& sink = SetHoldingSink(log_);
  EXPECT_EQ(log_.Unsafe(), absl::OkStatus());
  sink.state.degraded = true;
  sink.state.reason = "no space left on device";
  EXPECT_EQ(log_.Unsafe().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(log_.Unsafe().message()),
              AllOf(HasSubstr("job 'job' went on without its journal"),
                    HasSubstr("that cannot be written yet: no space left on device")));
  sink.state.hole = true;
  sink.state.degraded = false;
  EXPECT_EQ(log_.Unsafe().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(log_.Unsafe().message()), HasSubstr("the snapshot that makes up for it is not there yet"));
  sink.state.hole = false;
  EXPECT_EQ(log_.Unsafe(), absl::OkStatus());
}

TEST_F(JobLogTest, TheDurableVersionIsThatOfEveryBucket) {
  HoldingSink& sink = SetHoldingSink(log_);
  sink.state.durable_versions = {5, 3};
  EXPECT_EQ(Describe(7, 0).durability().durable_version(), 3u);
  EXPECT_EQ(Describe(7, 4).durability().durable_version(), 4u) << "it was recovered";
  EXPECT_EQ(Describe(2, 0).durability().durable_version(), 2u) << "no more than there is";
  sink.state.durable_versions = {5};
  EXPECT_EQ(Describe(7, 0).durability().durable_version(), 0u) << "nothing is written of the other one";
}

TEST_F(JobLogTest, TheStatusIsThatOfTheSink) {
  HoldingSink& sink = SetHoldingSink(log_);
  sink.state.degraded = true;
  sink.state.hole = true;
  sink.state.reason = "why";
  sink.state.records = 1;
  sink.state.syncs = 2;
  sink.state.failures = 3;
  sink.state.bytes = 4;
  sink.state.backlog_bytes = 5;
  sink.state.followers = {{"standby", 6, true}, {"late", 2, false}};
  const v1::JobStatus status = Describe(7, 0);
  const v1::DurabilityStatus& durability = status.durability();
  EXPECT_TRUE(durability.degraded());
  EXPECT_TRUE(durability.hole());
  EXPECT_EQ(durability.reason(), "why");
  EXPECT_EQ(durability.records(), 1u);
  EXPECT_EQ(durability.syncs(), 2u);
  EXPECT_EQ(durability.failures(), 3u);
  EXPECT_EQ(durability.journal_bytes(), 4u);
  EXPECT_EQ(durability.backlog_bytes(), 5u);
  ASSERT_EQ(status.followers_size(), 2);
  EXPECT_EQ(status.followers(0).follower(), "standby");
  EXPECT_EQ(status.followers(0).version(), 6u);
  EXPECT_TRUE(status.followers(0).in_sync());
  EXPECT_FALSE(status.followers(1).in_sync());
}

TEST_F(JobLogTest, ACutKeepsWhatWorkersThatAreAwayMayAskFor) {
  HoldingSink& sink = SetHoldingSink(log_);
  const uint64_t behind = job_.by_rounds().past->RoundsBehindSnapshot();
  ASSERT_GT(behind, 0u);
  {
    absl::MutexLock lock(&job_.parts().mu);
    for (const uint64_t round : {8, 9}) {
      job_.parts().rounds->RestoreContribution(MakeMemberId("away", 1), 1, round, /*digest=*/7);
    }
  }
  log_.CutBehind(/*version=*/12, /*oldest=*/9 + behind);
  EXPECT_EQ(sink.snapshot, 12u);
  EXPECT_EQ(sink.kept_from, 9u);
  ASSERT_EQ(sink.records.size(), 1u) << "the journal has the later one still";
  EXPECT_EQ(sink.records_before_cut, 1u);
  EXPECT_EQ(sink.records[0].type, journal::RecordType::kKept);
  EXPECT_EQ(sink.records[0].bucket, 1u);
  EXPECT_EQ(sink.records[0].round, 8u);
  ASSERT_EQ(sink.records[0].contributions.size(), 1u);
  EXPECT_EQ(sink.records[0].contributions[0].digest, 7u);

  log_.CutBehind(/*version=*/12, /*oldest=*/behind - 1);
  EXPECT_EQ(sink.kept_from, 0u);
  EXPECT_EQ(sink.records.size(), 1u);
}

TEST_F(JobLogTest, ACopyNeedsParameters) {
  EXPECT_EQ(log_.CopyBucket(0).status(), absl::FailedPreconditionError("the job has no parameters yet"));
  job_.Initialize(*member_, 1.0f);
  const auto records = log_.CopyBucket(1);
  ASSERT_TRUE(records.ok()) << records.status();
  ASSERT_EQ(records->size(), 1u);
  EXPECT_EQ((*records)[0].type, journal::RecordType::kState);
  EXPECT_EQ((*records)[0].bucket, 1u);
  EXPECT_EQ((*records)[0].round, 0u);
}

TEST_F(JobLogTest, ACopyWaitsForARoundThatIsBeingApplied) {
  job_.Initialize(*member_, 1.0f);
  ClosedBucket closed = Close(0);
  absl::Notification copied;
  absl::StatusOr<std::vector<journal::Record>> records;
  std::thread copying([&] {
    records = log_.CopyBucket(0);
    copied.Notify();
  });
  EXPECT_FALSE(copied.WaitForNotificationWithTimeout(absl::Milliseconds(20)));
  EXPECT_EQ(log_.CopyBucket(1)->at(0).round, 0u) << "of a bucket that has not closed";
  job_.apply.Pass(std::move(closed));
  copying.join();
  ASSERT_TRUE(records.ok()) << records.status();
  ASSERT_EQ(records->size(), 2u);
  EXPECT_EQ(records->at(0).type, journal::RecordType::kState);
  EXPECT_EQ(records->at(0).round, 1u);
  EXPECT_EQ(records->at(1).type, journal::RecordType::kUpdate);
  EXPECT_EQ(records->at(1).round, 0u);
}

TEST_F(JobLogTest, ACopyWaitsForNoRoundThatTheShardsStillHaveToAgreeOn) {
  JobLog waiting(&job_.parts(), job_.by_rounds().past.get(), /*waits_for_shards=*/true);
  job_.Initialize(*member_, 1.0f);
  Close(0);  // and is held: its record has not passed the sink
  const auto records = waiting.CopyBucket(0);
  ASSERT_TRUE(records.ok()) << records.status();
  EXPECT_EQ(records->at(0).round, 0u);
}

TEST_F(JobLogTest, ThereIsNoCopyOfWhatHasStoppedOrIsGone) {
  job_.Initialize(*member_, 1.0f);
  Close(0);
  {
    absl::MutexLock lock(&job_.bucket(0).mu);
    job_.bucket(0).failure = absl::InternalError("it broke");
  }
  EXPECT_EQ(log_.CopyBucket(0).status(), absl::InternalError("it broke"));
  EXPECT_TRUE(log_.CopyBucket(1).ok());
  {
    absl::MutexLock lock(&job_.parts().mu);
    job_.parts().shut = absl::AbortedError("deleted");
  }
  EXPECT_EQ(log_.CopyBucket(1).status(), absl::AbortedError("deleted"));
}

}  // namespace
}  // namespace gradwire

// When records may be seen: group commit, the interval, and what happens while the disk fails.
#include "server/journal/journal.h"

#include <gtest/gtest.h>

#include <atomic>

#include "tests/lib/manual_clock.h"
#include "tests/unit/common/journal/records.h"

namespace gradwire::journal {
namespace {

using testing_support::FakeDisk;
using testing_support::ManualClock;

constexpr TimeNs kMs = 1'000'000;

// Pumped by the test.
class JournalTest : public testing::Test {
 protected:
  void Open(Level level, OnFailure on_failure) {
    MakeDirectories(disk_);
    JournalOptions options;
    options.job = "job";
    options.level = level;
    options.on_failure = on_failure;
    options.sync_interval_ns = 100 * kMs;
    options.first_retry_ns = 10 * kMs;
    options.last_retry_ns = 40 * kMs;
    options.backlog_limit_bytes = 8000;
    journal_ = std::make_unique<Journal>(options, std::make_unique<JournalWriter>(MakeWriter(&disk_, {})), &clock_);
  }
  void Append(uint64_t count = 1) {
    for (uint64_t i = 0; i < count; ++i) journal_->Append(MakeRecord(appended_++), [this] { ++visible_; });
  }
  // What a loss of power would leave.
  size_t OnDisk() {
    std::mt19937 random(1);
    disk_.PowerCycle(random);
    return Recover(disk_).records.size();
  }

  FakeDisk disk_;
  ManualClock clock_;
  std::unique_ptr<Journal> journal_;
  uint64_t appended_ = 0;
  uint64_t visible_ = 0;
};

TEST_F(JournalTest, FsyncSharesOneSyncAmongAllThatWait) {
  Open(Level::kFsync, OnFailure::kWait);
  Append(5);
  EXPECT_EQ(visible_, 0u);
  journal_->Pump();
  EXPECT_EQ(visible_, 5u);
  EXPECT_EQ(journal_->status().syncs, 1u);
  EXPECT_EQ(journal_->status().records, 5u);
  EXPECT_EQ(journal_->status().durable_versions, (std::vector<uint64_t>{3, 2}));
  EXPECT_EQ(OnDisk(), 5u);
}

TEST_F(JournalTest, IntervalIsVisibleAtOnceAndSyncedInTime) {
  Open(Level::kInterval, OnFailure::kWait);
  Append(2);
  EXPECT_EQ(journal_->Pump(), clock_.now + 100 * kMs);
  EXPECT_EQ(visible_, 2u);
  EXPECT_TRUE(journal_->status().durable_versions.empty());
  clock_.now += 60 * kMs;
  Append(1);
  EXPECT_EQ(journal_->Pump(), clock_.now + 40 * kMs);
  EXPECT_EQ(journal_->status().syncs, 0u);
  clock_.now += 40 * kMs;
  journal_->Pump();
  EXPECT_EQ(journal_->status().syncs, 1u);
  EXPECT_EQ(journal_->status().durable_versions, (std::vector<uint64_t>{2, 1}));
  EXPECT_EQ(OnDisk(), 3u);
}

TEST_F(JournalTest, WaitShowsNothingUntilTheDiskIsWellAgain) {
  Open(Level::kFsync, OnFailure::kWait);
  Append(1);
  journal_->Pump();
  disk_.set_capacity(0);
  Append(2);
  EXPECT_EQ(journal_->Pump(), clock_.now + 10 * kMs);
  EXPECT_EQ(visible_, 1u);
  EXPECT_TRUE(journal_->status().degraded);
  EXPECT_EQ(journal_->status().reason, "no space left on device");
  EXPECT_GT(journal_->status().backlog_bytes, 0u);
  clock_.now += 10 * kMs;
  EXPECT_EQ(journal_->Pump(), clock_.now + 20 * kMs) << "it waits longer after each try";
  disk_.set_capacity(UINT64_MAX);
  clock_.now += 5 * kMs;
  journal_->Pump();
  EXPECT_EQ(visible_, 1u) << "not tried yet";
  clock_.now += 15 * kMs;
  journal_->Pump();
  EXPECT_EQ(visible_, 3u);
  EXPECT_FALSE(journal_->status().degraded);
  EXPECT_EQ(journal_->status().failures, 1u);
  EXPECT_EQ(OnDisk(), 3u);
}

TEST_F(JournalTest, ContinueGoesOnAndMakesUpForIt) {
  Open(Level::kFsync, OnFailure::kContinue);
  Append(1);
  journal_->Pump();
  disk_.set_sync_error(absl::UnknownError("I/O error"));
  Append(3);
  journal_->Pump();
  EXPECT_EQ(visible_, 4u);
  EXPECT_TRUE(journal_->status().degraded);
  EXPECT_EQ(journal_->status().durable_versions, (std::vector<uint64_t>{1}));
  disk_.set_sync_error(absl::OkStatus());
  clock_.now += 10 * kMs;
  journal_->Pump();
  EXPECT_FALSE(journal_->status().degraded);
  EXPECT_EQ(journal_->status().durable_versions, (std::vector<uint64_t>{2, 2}));
  EXPECT_EQ(OnDisk(), 4u);
}

TEST_F(JournalTest, BacklogOverItsLimitLeavesAHoleThatASnapshotCloses) {
  Open(Level::kFsync, OnFailure::kContinue);
  disk_.set_capacity(0);
  Append(20);
  journal_->Pump();
  EXPECT_EQ(visible_, 20u);
  EXPECT_TRUE(journal_->status().hole);
  EXPECT_EQ(journal_->status().backlog_bytes, 0u);
  disk_.set_capacity(UINT64_MAX);
  clock_.now += 10 * kMs;
  Append(2);
  journal_->Pump();
  EXPECT_FALSE(journal_->status().degraded);
  EXPECT_TRUE(journal_->status().hole);
  journal_->SnapshotTaken(9, 7);
  journal_->Pump();
  EXPECT_TRUE(journal_->status().hole) << "rounds 9 of the buckets are lost";
  journal_->SnapshotTaken(10, 8);
  journal_->Pump();
  EXPECT_FALSE(journal_->status().hole);
}

TEST_F(JournalTest, InitialParametersThatAreGivenUpLeaveAHole) {
  Open(Level::kFsync, OnFailure::kContinue);
  disk_.set_capacity(0);
  for (int i = 0; i < 40; ++i) {
    journal::Record record = MakeRecord(0);
    record.type = journal::RecordType::kInitial;
    journal_->Append(std::move(record), [] {});
  }
  journal_->Pump();
  EXPECT_TRUE(journal_->status().hole);
  journal_->SnapshotTaken(1, 0);
  journal_->Pump();
  EXPECT_FALSE(journal_->status().hole);
}

TEST_F(JournalTest, SnapshotLetsOldSegmentsGo) {
  Open(Level::kFsync, OnFailure::kWait);
  for (int i = 0; i < 40; ++i) {
    Append(1);
    journal_->Pump();
  }
  const uint64_t before = journal_->status().bytes;
  journal_->SnapshotTaken(14, 12);
  journal_->Pump();
  EXPECT_LT(journal_->status().bytes, before / 2 + 5000);
  const Recovered recovered = Recover(disk_);
  ASSERT_TRUE(recovered.status.ok()) << recovered.status;
  EXPECT_LE(recovered.records.front().round, 12u);
  EXPECT_GT(recovered.records.front().round, 8u);
  EXPECT_EQ(recovered.records.back().round, 19u);
}

TEST_F(JournalTest, SegmentsThatASnapshotLetsGoGoOnceTheDiskIsWell) {
  Open(Level::kFsync, OnFailure::kWait);
  for (int i = 0; i < 40; ++i) {
    Append(1);
    journal_->Pump();
  }
  disk_.set_sync_error(absl::UnknownError("I/O error"));
  Append(1);
  journal_->Pump();
  ASSERT_TRUE(journal_->status().degraded);
  const uint64_t before = journal_->status().bytes;
  journal_->SnapshotTaken(14, 12);
  journal_->Pump();
  EXPECT_GE(journal_->status().bytes, before);
  disk_.set_sync_error(absl::OkStatus());
  clock_.now += 10 * kMs;
  journal_->Pump();
  ASSERT_FALSE(journal_->status().degraded);
  EXPECT_LT(journal_->status().bytes, before / 2 + 5000);
  EXPECT_LE(Recover(disk_).records.front().round, 12u);
}

TEST_F(JournalTest, ThreadCommitsAndStopWritesTheRest) {
  Open(Level::kInterval, OnFailure::kWait);
  journal_->Start();
  std::atomic<uint64_t> visible{0};
  for (uint64_t n = 0; n < 100; ++n) journal_->Append(MakeRecord(n), [&visible] { ++visible; });
  journal_->Stop();
  EXPECT_EQ(visible, 100u);
  journal_->Append(MakeRecord(100), [] { ADD_FAILURE() << "after Stop"; });
  EXPECT_EQ(OnDisk(), 100u);
}

}  // namespace
}  // namespace gradwire::journal

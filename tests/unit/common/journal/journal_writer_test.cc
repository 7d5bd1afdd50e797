// Rotation, failures and healing of the writer.
#include "common/journal/journal_writer.h"

#include <gtest/gtest.h>

#include "tests/unit/common/journal/records.h"

namespace gradwire::journal {
namespace {

using testing_support::FakeDisk;

class JournalWriterTest : public testing::Test {
 protected:
  void SetUp() override { MakeDirectories(disk_); }
  void ExpectRecords(uint64_t count) {
    const Recovered recovered = Recover(disk_, /*repair=*/false);
    ASSERT_TRUE(recovered.status.ok()) << recovered.status;
    ASSERT_EQ(recovered.records.size(), count);
    for (uint64_t n = 0; n < count; ++n) ExpectSame(MakeRecord(n), recovered.records[n]);
  }
  FakeDisk disk_;
};

TEST_F(JournalWriterTest, SaysWhichVersionsAreDurable) {
  JournalWriter writer = MakeWriter(&disk_, {});
  for (uint64_t n = 0; n < 5; ++n) ASSERT_TRUE(writer.Append(MakeRecord(n)).ok());
  EXPECT_TRUE(writer.durable_versions().empty());
  EXPECT_EQ(writer.backlog_end(), 3u);
  ASSERT_TRUE(writer.Sync().ok());
  EXPECT_EQ(writer.durable_versions(), (std::vector<uint64_t>{3, 2}));
  EXPECT_EQ(writer.unsynced_bytes(), 0u);
}

TEST_F(JournalWriterTest, FullDiskHealsWhenThereIsRoom) {
  JournalWriter writer = MakeWriter(&disk_, {}, 1, 2500);
  uint64_t n = 0;
  for (; n < 4; ++n) ASSERT_TRUE(writer.Append(MakeRecord(n)).ok());
  ASSERT_TRUE(writer.Sync().ok());
  disk_.set_capacity(disk_.SizeOf(disk_.Files().front()) + 700);
  for (; n < 20; ++n) writer.Append(MakeRecord(n)).IgnoreError();
  EXPECT_EQ(writer.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(writer.Sync().ok());
  EXPECT_FALSE(writer.Heal().ok());
  EXPECT_GT(writer.unsynced_bytes(), 0u);
  disk_.set_capacity(UINT64_MAX);
  ASSERT_TRUE(writer.Heal().ok());
  EXPECT_EQ(writer.unsynced_bytes(), 0u);
  for (; n < 25; ++n) ASSERT_TRUE(writer.Append(MakeRecord(n)).ok());
  ASSERT_TRUE(writer.Sync().ok());
  ExpectRecords(n);
}

// A process that is killed leaves what it wrote in the memory of the system. Who goes on from there shows it to
// workers.
TEST_F(JournalWriterTest, WhatAJournalIsGoneOnFromSurvivesALossOfPower) {
  JournalWriter killed = MakeWriter(&disk_, {});
  for (uint64_t n = 0; n < 3; ++n) ASSERT_TRUE(killed.Append(MakeRecord(n)).ok());
  disk_.ProcessDied();
  ASSERT_EQ(Recover(disk_, /*repair=*/true).records.size(), 3u);
  std::mt19937 random(1);
  disk_.PowerCycle(random);
  ExpectRecords(3);
}

// Records that were written may have been seen (durability interval): a process that dies while it heals keeps them.
TEST_F(JournalWriterTest, AFailedWriteLeavesTheRecordsBeforeIt) {
  for (uint64_t call = 0; call < 6; ++call) {
    FakeDisk disk;
    MakeDirectories(disk);
    JournalWriter writer = MakeWriter(&disk, {});
    for (uint64_t n = 0; n < 3; ++n) ASSERT_TRUE(writer.Append(MakeRecord(n)).ok());
    disk.set_write_error(absl::UnknownError("an I/O error"));
    EXPECT_FALSE(writer.Append(MakeRecord(3)).ok());
    disk.set_write_error(absl::OkStatus());
    disk.CrashAt(disk.calls() + call);
    writer.Heal().IgnoreError();
    disk.ProcessDied();
    const Recovered recovered = Recover(disk, /*repair=*/true);
    ASSERT_TRUE(recovered.status.ok()) << recovered.status;
    EXPECT_GE(recovered.records.size(), 3u) << "died at call " << call;
  }
}

// After a failed sync the system may have dropped the pages and report success from then on.
TEST_F(JournalWriterTest, FailedSyncWritesEverythingAgainToAnotherSegment) {
  JournalWriter writer = MakeWriter(&disk_, {});
  ASSERT_TRUE(writer.Append(MakeRecord(0)).ok());
  ASSERT_TRUE(writer.Sync().ok());
  const uint64_t synced = disk_.SizeOf(SegmentPath(kDirectory, 1));
  ASSERT_TRUE(writer.Append(MakeRecord(1)).ok());
  disk_.set_sync_error(absl::UnknownError("I/O error"));
  EXPECT_FALSE(writer.Sync().ok());
  disk_.set_sync_error(absl::OkStatus());
  EXPECT_FALSE(writer.Sync().ok()) << "a failed journal heals, it does not sync";
  ASSERT_TRUE(writer.Append(MakeRecord(2)).code() == absl::StatusCode::kUnknown);
  ASSERT_TRUE(writer.Heal().ok());
  EXPECT_EQ(disk_.SizeOf(SegmentPath(kDirectory, 1)), synced);
  EXPECT_EQ(disk_.Files().size(), 2u);
  ExpectRecords(3);
}

TEST_F(JournalWriterTest, EveryFailedCallHeals) {
  for (uint64_t failing = 0; failing < 40; ++failing) {
    SCOPED_TRACE(failing);
    FakeDisk disk;
    MakeDirectories(disk);
    JournalWriter writer = MakeWriter(&disk, {}, 1, 2000);
    for (uint64_t n = 0; n < 40; ++n) {
      if (n == failing)
        (n % 2 == 0 ? disk.set_write_error(absl::UnknownError("I/O error"))
                    : disk.set_sync_error(absl::UnknownError("I/O error")));
      writer.Append(MakeRecord(n)).IgnoreError();
      if (n % 3 == 0) writer.Sync().IgnoreError();
      if (n == failing + 4) {
        disk.set_write_error(absl::OkStatus());
        disk.set_sync_error(absl::OkStatus());
        ASSERT_TRUE(writer.Heal().ok());
      } else if (n > failing) {
        writer.Heal().IgnoreError();
      }
    }
    disk.set_write_error(absl::OkStatus());
    disk.set_sync_error(absl::OkStatus());
    ASSERT_TRUE(writer.Heal().ok());
    ASSERT_TRUE(writer.Sync().ok());
    const Recovered recovered = Recover(disk, /*repair=*/false);
    ASSERT_TRUE(recovered.status.ok()) << recovered.status;
    ASSERT_EQ(recovered.records.size(), 40u);
    for (uint64_t n = 0; n < 40; ++n) ExpectSame(MakeRecord(n), recovered.records[n]);
  }
}

TEST_F(JournalWriterTest, ServerThatWasReplacedDoesNotHeal) {
  JournalWriter old = MakeWriter(&disk_, {}, 1, 1);
  ASSERT_TRUE(old.Append(MakeRecord(0)).ok());
  ASSERT_TRUE(old.Sync().ok());
  JournalWriter successor = MakeWriter(&disk_, Recover(disk_).result, 2);
  ASSERT_TRUE(successor.Append(MakeRecord(1)).ok());
  ASSERT_TRUE(successor.Sync().ok());
  EXPECT_EQ(old.Append(MakeRecord(2)).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(old.Heal().ok());
  ExpectRecords(2);
}

TEST_F(JournalWriterTest, CutRemovesWhatASnapshotCovers) {
  JournalWriter writer = MakeWriter(&disk_, {}, 1, 2000);
  for (uint64_t n = 0; n < 30; ++n) ASSERT_TRUE(writer.Append(MakeRecord(n)).ok());
  ASSERT_TRUE(writer.Sync().ok());
  const uint64_t before = writer.bytes();
  ASSERT_TRUE(writer.Cut(10).ok());
  EXPECT_LT(writer.bytes(), before);
  const Recovered recovered = Recover(disk_);
  ASSERT_TRUE(recovered.status.ok()) << recovered.status;
  EXPECT_GT(recovered.records.front().round, 0u);
  EXPECT_LE(recovered.records.front().round, 10u);
  EXPECT_EQ(recovered.records.back().round, 14u);
}

}  // namespace
}  // namespace gradwire::journal

// The journal over a disk that loses power at every call: every acknowledged record is there, none is damaged.
#include <gtest/gtest.h>

#include "tests/unit/common/journal/records.h"

namespace gradwire::journal {
namespace {

using testing_support::FakeDisk;

constexpr uint64_t kBatches = 12;
constexpr uint64_t kSegmentBytes = 3000;

// Appends records from number `next` on in batches of 1 to 3, syncs each, until the power goes or all batches are
// written. Returns how many are acknowledged; `attempted` is how many were handed over.
uint64_t Write(FakeDisk& disk, ReadResult found, uint64_t epoch, uint64_t next, uint64_t* attempted) {
  JournalWriter writer = MakeWriter(&disk, std::move(found), epoch, kSegmentBytes);
  uint64_t acknowledged = next;
  for (uint64_t batch = 0; batch < kBatches; ++batch) {
    for (uint64_t i = 0; i <= batch % 3; ++i) writer.Append(MakeRecord(next++)).IgnoreError();
    *attempted = next;
    if (!writer.Sync().ok()) return acknowledged;
    acknowledged = next;
  }
  return acknowledged;
}

void ExpectSeries(const Recovered& recovered, uint64_t acknowledged, uint64_t attempted) {
  ASSERT_TRUE(recovered.status.ok()) << recovered.status;
  ASSERT_GE(recovered.records.size(), acknowledged);
  ASSERT_LE(recovered.records.size(), attempted);
  for (uint64_t n = 0; n < recovered.records.size(); ++n) ExpectSame(MakeRecord(n), recovered.records[n]);
}

TEST(JournalCrash, AfterEveryCallAcknowledgedRecordsAreThere) {
  uint64_t torn = 0;
  for (uint32_t seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    for (uint64_t call = 0;; ++call) {
      SCOPED_TRACE(absl::StrCat("seed ", seed, " call ", call));
      FakeDisk disk;
      MakeDirectories(disk);
      const uint64_t before = disk.calls();
      disk.CrashAt(before + call);
      uint64_t attempted = 0;
      uint64_t acknowledged = Write(disk, {}, 1, 0, &attempted);
      const bool over = !disk.crashed();
      disk.PowerCycle(random);
      Recovered recovered = Recover(disk);
      ExpectSeries(recovered, acknowledged, attempted);
      if (HasFatalFailure()) return;
      torn += recovered.result.torn_bytes > 0 ? 1 : 0;
      // Another server goes on where this one ended, and loses power, too, in the middle of recovery or later.
      disk.CrashAt(random() % 30);
      recovered = Recover(disk);
      acknowledged = attempted = recovered.records.size();
      if (recovered.status.ok()) {
        acknowledged = Write(disk, recovered.result, 2, acknowledged, &attempted);
      } else {
        acknowledged = attempted = UINT64_MAX;  // it did not get as far as to write
      }
      disk.PowerCycle(random);
      const Recovered again = Recover(disk);
      if (acknowledged != UINT64_MAX) ExpectSeries(again, acknowledged, attempted);
      EXPECT_TRUE(again.status.ok()) << again.status;
      if (HasFailure()) return;
      if (over) break;
    }
  }
  EXPECT_GT(torn, 100u);  // the disk did tear writes
}

TEST(JournalCrash, CuttingLeavesNoHole) {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    std::mt19937 random(seed);
    FakeDisk disk;
    MakeDirectories(disk);
    uint64_t attempted = 0;
    ASSERT_EQ(Write(disk, {}, 1, 0, &attempted), attempted);
    Recovered recovered = Recover(disk);
    JournalWriter writer = MakeWriter(&disk, recovered.result, 2, kSegmentBytes);
    disk.CrashAt(disk.calls() + random() % 8);
    writer.Cut(8).IgnoreError();
    disk.PowerCycle(random);
    recovered = Recover(disk);
    ASSERT_TRUE(recovered.status.ok()) << recovered.status;
    ASSERT_FALSE(recovered.records.empty());
    const uint64_t first = 2 * recovered.records[0].round + recovered.records[0].bucket;
    EXPECT_LE(first, 16u);
    EXPECT_EQ(first + recovered.records.size(), attempted);
  }
}

}  // namespace
}  // namespace gradwire::journal

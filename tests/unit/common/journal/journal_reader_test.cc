// Torn tails are cut off, damage is refused with file and offset, what a fenced server wrote is ignored.
#include "common/journal/journal_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/common/journal/records.h"

namespace gradwire::journal {
namespace {

using testing::HasSubstr;
using testing_support::FakeDisk;

class JournalReaderTest : public testing::Test {
 protected:
  void SetUp() override { MakeDirectories(disk_); }
  // Records 0 to count - 1; a sync after every `batch`.
  void Write(uint64_t count, uint64_t batch, uint64_t segment_bytes = 1u << 20) {
    JournalWriter writer = MakeWriter(&disk_, {}, 1, segment_bytes);
    for (uint64_t n = 0; n < count; ++n) {
      ASSERT_TRUE(writer.Append(MakeRecord(n)).ok());
      ASSERT_TRUE((n + 1) % batch != 0 || writer.Sync().ok());
    }
  }
  void AppendBytes(const std::string& path, size_t bytes) {
    auto file = disk_.Open(path);
    ASSERT_TRUE(file.ok());
    std::vector<uint8_t> all((*file)->size());
    ASSERT_TRUE((*file)->Read(0, all).ok());
    all.resize(all.size() + bytes, 0x5A);
    ASSERT_TRUE(disk_.Remove(path).ok());
    auto made = disk_.Create(path);
    ASSERT_TRUE(made.ok());
    const std::span<const uint8_t> piece = all;
    ASSERT_TRUE((*made)->Append({&piece, 1}).ok());
  }
  // Byte offset of record n of segment 1, where all of them are.
  static uint64_t OffsetOf(uint64_t n) {
    uint64_t offset = kSegmentHeaderBytes;
    for (uint64_t i = 0; i < n; ++i) offset += EncodeRecord(MakeRecord(i), 1, 0).bytes;
    return offset;
  }

  FakeDisk disk_;
  const std::string first_ = SegmentPath(kDirectory, 1);
};

TEST_F(JournalReaderTest, EmptyDirectoryIsAnEmptyJournal) {
  const Recovered recovered = Recover(disk_);
  EXPECT_TRUE(recovered.status.ok()) << recovered.status;
  EXPECT_TRUE(recovered.records.empty());
}

TEST_F(JournalReaderTest, TornTailIsCutOffOnceAndForAll) {
  Write(5, 1);
  const uint64_t whole = disk_.SizeOf(first_);
  AppendBytes(first_, 200);
  Recovered looked = Recover(disk_, /*repair=*/false);
  ASSERT_TRUE(looked.status.ok()) << looked.status;
  EXPECT_EQ(looked.result.torn_bytes, 200u);
  EXPECT_EQ(disk_.SizeOf(first_), whole + 200);
  EXPECT_EQ(Recover(disk_).records.size(), 5u);
  EXPECT_EQ(disk_.SizeOf(first_), whole);
  EXPECT_EQ(Recover(disk_).result.torn_bytes, 0u);
}

TEST_F(JournalReaderTest, DamageBeforeSyncedRecordsIsRefusedWithItsPlace) {
  Write(6, 1);
  const uint64_t offset = OffsetOf(2);
  disk_.FlipBit(first_, (offset + 70) * 8 + 3);
  const Recovered recovered = Recover(disk_);
  EXPECT_EQ(recovered.status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(recovered.status.message()),
              testing::AllOf(HasSubstr(first_), HasSubstr(absl::StrCat("offset ", offset))));
  EXPECT_EQ(recovered.records.size(), 2u);
}

TEST_F(JournalReaderTest, DamagedHeaderOfAFileIsRefused) {
  Write(3, 1);
  disk_.FlipBit(first_, 8 * 8);
  EXPECT_EQ(Recover(disk_).status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(disk_.Files().size(), 1u);
}

// Pages of one batch may reach the disk in any order: a hole in what was never synced is no damage.
TEST_F(JournalReaderTest, HoleInABatchThatWasNeverSyncedIsATornTail) {
  Write(6, 100);
  disk_.FlipBit(first_, (OffsetOf(2) + 70) * 8);
  const Recovered recovered = Recover(disk_);
  ASSERT_TRUE(recovered.status.ok()) << recovered.status;
  EXPECT_EQ(recovered.records.size(), 2u);
}

TEST_F(JournalReaderTest, DamageInAClosedSegmentIsRefused) {
  Write(30, 100, 3000);
  ASSERT_GT(disk_.Files().size(), 3u);
  const std::string second = SegmentPath(kDirectory, 2);
  disk_.FlipBit(second, disk_.SizeOf(second) * 8 - 1);  // padding or payload of its last record
  const Recovered recovered = Recover(disk_);
  EXPECT_EQ(recovered.status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(recovered.status.message()), HasSubstr(second));
}

TEST_F(JournalReaderTest, InspectionTellsOfEveryDamageAndGoesOnBehindIt) {
  Write(30, 1, 3000);
  ASSERT_GT(disk_.Files().size(), 4u);
  const std::string second = SegmentPath(kDirectory, 2), third = SegmentPath(kDirectory, 3);
  disk_.FlipBit(first_, (OffsetOf(1) + 70) * 8);
  disk_.FlipBit(second, 3 * 8);  // its header
  const uint64_t records = Recover(disk_, false).records.size();
  ASSERT_EQ(records, 1u);
  std::vector<Damage> damage;
  std::vector<uint64_t> rounds;
  const auto inspect = [&] {
    damage.clear();
    rounds.clear();
    return InspectJournal(
        disk_, kDirectory, kIdentity, [&](const Damage& d) { damage.push_back(d); },
        [&](const Record& record) {
          rounds.push_back(2 * record.round + record.bucket);
          return absl::OkStatus();
        });
  };
  ASSERT_TRUE(inspect().ok());
  ASSERT_EQ(damage.size(), 2u);
  EXPECT_EQ(damage[0].path, first_);
  EXPECT_EQ(damage[0].offset, OffsetOf(1));
  EXPECT_EQ(damage[1].path, second);
  EXPECT_EQ(damage[1].offset, 0u);
  std::vector<uint64_t> expected;
  for (uint64_t n = 0; n < 30; ++n) {
    if (n != 1) expected.push_back(n);
  }
  EXPECT_EQ(rounds, expected) << "all but the damaged one";
  ASSERT_TRUE(disk_.Remove(third).ok());
  ASSERT_TRUE(inspect().ok());
  ASSERT_EQ(damage.size(), 3u);
  EXPECT_EQ(damage[2].path, third);
  EXPECT_LT(rounds.size(), expected.size());
}

TEST_F(JournalReaderTest, MissingOrShortSegmentIsRefused) {
  Write(30, 1, 3000);
  FakeDisk& disk = disk_;
  const std::string second = SegmentPath(kDirectory, 2);
  const uint64_t bytes = disk.SizeOf(second);
  ASSERT_TRUE(disk.Truncate(second, bytes - 8).ok());
  EXPECT_THAT(std::string(Recover(disk).status.message()), HasSubstr("8 bytes are missing"));
  ASSERT_TRUE(disk.Remove(second).ok());
  EXPECT_THAT(std::string(Recover(disk).status.message()),
              testing::AllOf(HasSubstr(second), HasSubstr("the file is missing")));
}

TEST_F(JournalReaderTest, WhatAFencedServerWroteIsIgnored) {
  Write(4, 1);
  JournalWriter old = MakeWriter(&disk_, Recover(disk_).result, 2);
  ASSERT_TRUE(old.Append(MakeRecord(4)).ok());
  ASSERT_TRUE(old.Sync().ok());
  // Another server takes over while the old one still writes.
  JournalWriter successor = MakeWriter(&disk_, Recover(disk_).result, 3, 1);
  ASSERT_TRUE(successor.Append(MakeRecord(5)).ok());
  ASSERT_TRUE(successor.Sync().ok());
  ASSERT_TRUE(old.Append(MakeRecord(77)).ok());
  ASSERT_TRUE(old.Sync().ok());
  const Recovered recovered = Recover(disk_);
  ASSERT_TRUE(recovered.status.ok()) << recovered.status;
  ASSERT_EQ(recovered.records.size(), 6u);
  EXPECT_EQ(recovered.result.epoch, 3u);
  for (uint64_t n = 0; n < 6; ++n) ExpectSame(MakeRecord(n), recovered.records[n]);
}

TEST_F(JournalReaderTest, JournalOfAnotherJobIsRefused) {
  Write(1, 1);
  Identity other = kIdentity;
  ++other.layout_digest;
  const auto read = ReadJournal(disk_, kDirectory, other, true, [](Record) { return absl::OkStatus(); });
  EXPECT_EQ(read.status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(JournalReaderTest, ErrorOfTheVisitorEndsIt) {
  Write(3, 1);
  const auto read =
      ReadJournal(disk_, kDirectory, kIdentity, true, [](Record) { return absl::InternalError("enough"); });
  EXPECT_EQ(read.status().message(), "enough");
}

}  // namespace
}  // namespace gradwire::journal

// The journal on the real file system.
#include "common/storage/posix_disk.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "tests/lib/temporary_folder.h"
#include "tests/unit/common/journal/records.h"

namespace gradwire::journal {
namespace {

class PosixDiskTest : public testing::Test {
 protected:
  const testing_support::TemporaryFolder folder_{"posix-disk"};
  const std::string& directory_ = folder_.path();
  PosixDisk disk_;
};

TEST_F(PosixDiskTest, WritesManyPiecesAndReadsThem) {
  const std::string path = directory_ + "/file";
  auto file = disk_.Create(path);
  ASSERT_TRUE(file.ok()) << file.status();
  std::vector<std::vector<uint8_t>> parts;
  std::vector<std::span<const uint8_t>> pieces;
  std::vector<uint8_t> expected;
  for (size_t i = 0; i < 200; ++i) parts.emplace_back(i % 7, static_cast<uint8_t>(i));
  for (const auto& part : parts) {
    pieces.emplace_back(part);
    expected.insert(expected.end(), part.begin(), part.end());
  }
  ASSERT_TRUE((*file)->Append(pieces).ok());
  ASSERT_TRUE((*file)->Sync().ok());
  auto read = disk_.Open(path);
  ASSERT_TRUE(read.ok()) << read.status();
  ASSERT_EQ((*read)->size(), expected.size());
  std::vector<uint8_t> all(expected.size());
  ASSERT_TRUE((*read)->Read(0, all).ok());
  EXPECT_EQ(all, expected);
  EXPECT_EQ((*read)->Read(1, all).code(), absl::StatusCode::kOutOfRange);
  ASSERT_TRUE(disk_.Truncate(path, 5).ok());
  EXPECT_EQ((*disk_.Open(path))->size(), 5u);
}

TEST_F(PosixDiskTest, ErrorsSayWhatAndWhere) {
  const std::string path = directory_ + "/file";
  EXPECT_EQ(disk_.Open(path).status().code(), absl::StatusCode::kNotFound);
  EXPECT_NE(std::string(disk_.Open(path).status().message()).find(path), std::string::npos);
  ASSERT_TRUE(disk_.Create(path).ok());
  EXPECT_EQ(disk_.Create(path).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_FALSE(disk_.CreateDirectory(path).ok()) << "there is a file of this name";
  EXPECT_TRUE(disk_.CreateDirectory(directory_).ok());
  EXPECT_EQ(disk_.Remove(directory_ + "/none").code(), absl::StatusCode::kNotFound);
  // A device that is always full.
  auto full = disk_.Create(directory_ + "/x");
  ASSERT_TRUE(disk_.Rename(path, directory_ + "/y").ok());
  EXPECT_EQ(*disk_.List(directory_), (std::vector<std::string>{"x", "y"}));
}

TEST_F(PosixDiskTest, NobodyElseMayReadWhatItMakes) {
  const mode_t before = umask(0);
  ASSERT_TRUE(disk_.Create(directory_ + "/file").ok());
  ASSERT_TRUE(disk_.Lock(directory_ + "/LOCK").ok());
  ASSERT_TRUE(disk_.CreateDirectory(directory_ + "/folder").ok());
  umask(before);
  using std::filesystem::perms;
  const auto mode = [&](const char* name) { return std::filesystem::status(directory_ + name).permissions(); };
  EXPECT_EQ(mode("/file"), perms::owner_read | perms::owner_write);
  EXPECT_EQ(mode("/LOCK"), perms::owner_read | perms::owner_write);
  EXPECT_EQ(mode("/folder"), perms::owner_all);
}

TEST_F(PosixDiskTest, WhatPeopleCanCureIsToldWithTheCure) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become somebody who may not write";
  ASSERT_EQ(seteuid(65534), 0);
  const absl::Status refused = disk_.Lock(directory_ + "/LOCK").status();
  ASSERT_EQ(seteuid(0), 0);
  EXPECT_EQ(refused.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_NE(std::string(refused.message()).find("; the user that runs this program has to be allowed to"),
            std::string::npos)
      << refused;
}

TEST_F(PosixDiskTest, CarriesAJournal) {
  JournalWriter::Options options;
  options.directory = directory_;
  options.identity = kIdentity;
  options.epoch = 1;
  options.segment_bytes = 3000;
  JournalWriter writer(&disk_, options, {});
  for (uint64_t n = 0; n < 20; ++n) ASSERT_TRUE(writer.Append(MakeRecord(n)).ok());
  ASSERT_TRUE(writer.Sync().ok());
  uint64_t n = 0;
  const auto read = ReadJournal(disk_, directory_, kIdentity, true, [&n](Record record) {
    ExpectSame(MakeRecord(n++), record);
    return absl::OkStatus();
  });
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(n, 20u);
  EXPECT_GT(read->segments.size(), 3u);
}

TEST_F(PosixDiskTest, WhetherAFileIsLockedIsSeenWithoutLockingIt) {
  const std::string path = directory_ + "/LOCK";
  EXPECT_FALSE(*disk_.IsLocked(path));
  EXPECT_FALSE(std::filesystem::exists(path));
  auto lock = disk_.Lock(path);
  ASSERT_TRUE(lock.ok()) << lock.status();
  EXPECT_TRUE(*disk_.IsLocked(path));
  lock->reset();
  EXPECT_FALSE(*disk_.IsLocked(path));
  EXPECT_TRUE(disk_.Lock(path).ok());
}

}  // namespace
}  // namespace gradwire::journal

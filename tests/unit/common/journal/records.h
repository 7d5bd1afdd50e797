// Records for tests of the journal.
#pragma once

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/journal/journal_reader.h"
#include "common/journal/journal_writer.h"
#include "tests/lib/fake_disk.h"

namespace gradwire::journal {

inline constexpr char kDirectory[] = "/data/journal";
inline constexpr Identity kIdentity = {0x1111, 0x2222, 3};

// Number `n` of a series: two buckets, their rounds in order; sizes and bytes depend on n alone.
inline Record MakeRecord(uint64_t n, size_t most_bytes = 900) {
  std::mt19937_64 random(n);
  Record record;
  record.bucket = static_cast<uint32_t>(n % 2);
  record.round = n / 2;
  for (uint64_t c = 0; c < n % 3; ++c) {
    record.contributions.push_back(
        {random(), absl::StrCat("worker-", c), random(), static_cast<uint32_t>(random()), c != 1});
  }
  for (uint64_t c = 0; c <= n % 2; ++c) {
    std::vector<uint8_t> bytes(1 + random() % most_bytes);
    for (uint8_t& b : bytes) b = static_cast<uint8_t>(random());
    record.chunks.push_back(Bytes::FromVector(std::move(bytes)));
  }
  return record;
}

inline void ExpectSame(const Record& expected, const Record& actual) {
  EXPECT_EQ(expected.type, actual.type);
  EXPECT_EQ(expected.bucket, actual.bucket);
  EXPECT_EQ(expected.round, actual.round);
  EXPECT_EQ(expected.contributions, actual.contributions);
  ASSERT_EQ(expected.chunks.size(), actual.chunks.size());
  for (size_t i = 0; i < expected.chunks.size(); ++i) {
    const auto a = expected.chunks[i].span(), b = actual.chunks[i].span();
    EXPECT_TRUE(std::equal(a.begin(), a.end(), b.begin(), b.end())) << "chunk " << i;
  }
}

inline void MakeDirectories(Disk& disk) {
  ASSERT_TRUE(disk.CreateDirectory("/data").ok());
  ASSERT_TRUE(disk.CreateDirectory(kDirectory).ok());
  ASSERT_TRUE(disk.SyncDirectory("").ok());
  ASSERT_TRUE(disk.SyncDirectory("/data").ok());
}

struct Recovered {
  absl::Status status;
  ReadResult result;
  std::vector<Record> records;
};

inline Recovered Recover(Disk& disk, bool repair = true) {
  Recovered recovered;
  auto read = ReadJournal(disk, kDirectory, kIdentity, repair, [&](Record record) {
    recovered.records.push_back(std::move(record));
    return absl::OkStatus();
  });
  recovered.status = read.status();
  if (read.ok()) recovered.result = *std::move(read);
  return recovered;
}

inline JournalWriter MakeWriter(Disk* disk, ReadResult found, uint64_t epoch = 1, uint64_t segment_bytes = 4096) {
  JournalWriter::Options options;
  options.directory = kDirectory;
  options.identity = kIdentity;
  options.epoch = epoch;
  options.segment_bytes = segment_bytes;
  return JournalWriter(disk, options, std::move(found));
}

}  // namespace gradwire::journal

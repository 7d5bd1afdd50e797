// Every byte of segment headers and records.
#include "common/journal/record.h"

#include <gtest/gtest.h>

#include <charconv>
#include <string_view>

#include "absl/strings/escaping.h"
#include "tests/unit/common/journal/records.h"

namespace gradwire::journal {
namespace {

std::vector<uint8_t> Joined(const EncodedRecord& encoded) {
  std::vector<uint8_t> bytes;
  for (const auto piece : encoded.Pieces()) bytes.insert(bytes.end(), piece.begin(), piece.end());
  EXPECT_EQ(bytes.size(), encoded.bytes);
  return bytes;
}

absl::StatusOr<Record> Decode(std::span<const uint8_t> bytes) {
  auto header = DecodeRecordHeader(bytes.first(std::min(bytes.size(), kRecordHeaderBytes)));
  if (!header.ok()) return header.status();
  if (header->body_bytes != bytes.size() - kRecordHeaderBytes) return absl::OutOfRangeError("size");
  return DecodeRecordBody(*header, Bytes::Copy(bytes.subspan(kRecordHeaderBytes)));
}

std::string Hex(std::span<const uint8_t> bytes) {
  return absl::BytesToHexString({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

std::vector<uint8_t> BytesOf(std::string_view hex) {
  std::vector<uint8_t> bytes(hex.size() / 2);
  for (size_t i = 0; i < bytes.size(); ++i) std::from_chars(&hex[2 * i], &hex[2 * i] + 2, bytes[i], 16);
  return bytes;
}

// The worked example of proto/JOURNAL.md.
TEST(JournalRecord, IsTheWorkedExampleOfTheSpec) {
  SegmentHeader header;
  header.sequence = 1;
  header.epoch = 7;
  header.identity = {0x1111111111111111u, 0x2222222222222222u, 3};
  EXPECT_EQ(Hex(EncodeSegmentHeader(header)),
            "47574a310400000001000000000000000700000000000000111111111111111122222222222222220300000000000000"
            "000000000000000000000000ff2608cc");
  Record record;
  record.bucket = 5;
  record.round = 9;
  record.contributions = {{0x0A, "w", 0x0B, 0x0C, true, 9}};
  record.chunks = {Bytes::FromString("abc")};
  EXPECT_EQ(Hex(Joined(EncodeRecord(record, 1, 64))),
            "47575231020000000500000001000000090000000000000030000000000000004000000000000000"
            "010000002d2ce5580100000000000000000000003d572ceb"
            "0a000000000000000b000000000000000c000000010100007700000000000000"
            "03000000000000006162630000000000");
}

TEST(JournalRecord, SegmentsOfVersions1And2AreRead) {
  for (const char* hex :
       {"47574a310100000001000000000000000700000000000000111111111111111122222222222222220300000000000000"
        "0000000000000000000000000561b120",
        "47574a310200000001000000000000000700000000000000111111111111111122222222222222220300000000000000"
        "000000000000000000000000fc718287"}) {
    const std::vector<uint8_t> bytes = BytesOf(hex);
    const auto header = DecodeSegmentHeader(bytes);
    ASSERT_TRUE(header.ok()) << header.status();
    EXPECT_EQ(header->epoch, 7u);
  }
}

TEST(JournalRecord, KeepsTheAgeOfContributions) {
  Record record = MakeRecord(3);
  record.round = 70'000;
  record.contributions = {{1, "w", 2, 3, true, 70'000}, {4, "", 5, 6, false, 70'000 - kMaxContributionAge}};
  const auto decoded = Decode(Joined(EncodeRecord(record, 1, 64)));
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->contributions, record.contributions);
}

TEST(JournalRecord, OfEveryTypeComesBack) {
  for (const RecordType type : {RecordType::kInitial, RecordType::kUpdate, RecordType::kState, RecordType::kKept}) {
    Record record = MakeRecord(3);
    record.type = type;
    const auto decoded = Decode(Joined(EncodeRecord(record, 1, 64)));
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(decoded->type, type);
  }
  std::vector<uint8_t> bytes = Joined(EncodeRecord(MakeRecord(3), 1, 64));
  bytes[4] = 5;
  EXPECT_FALSE(Decode(bytes).ok());
}

TEST(JournalRecord, OnlyWhatWasKeptMayHaveNoFrame) {
  Record record = MakeRecord(3);
  record.chunks.clear();
  EXPECT_FALSE(Decode(Joined(EncodeRecord(record, 1, 64))).ok());
  record.type = RecordType::kKept;
  const auto decoded = Decode(Joined(EncodeRecord(record, 1, 64)));
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->contributions, record.contributions);
  EXPECT_EQ(VersionOf(*decoded), 0u);
}

TEST(JournalRecord, OfACompressedUpdateHasItsMeanBehindIt) {
  Record record = MakeRecord(3);
  const size_t chunks = record.chunks.size();
  record.mean_chunks = {Bytes::FromString("mean"), Bytes::FromString("of the round")};
  std::vector<uint8_t> bytes = Joined(EncodeRecord(record, 1, 64));
  const auto decoded = Decode(bytes);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  ExpectSame(record, *decoded);
  EXPECT_EQ(decoded->chunks.size(), chunks);
  ASSERT_EQ(decoded->mean_chunks.size(), 2u);
  EXPECT_EQ(Hex(decoded->mean_chunks[1].span()), Hex(record.mean_chunks[1].span()));
  // All of its chunks cannot be those of the mean, and only updates have one.
  record.chunks.clear();
  EXPECT_FALSE(Decode(Joined(EncodeRecord(record, 1, 64))).ok());
  record = *decoded;
  record.type = RecordType::kState;
  EXPECT_FALSE(Decode(Joined(EncodeRecord(record, 1, 64))).ok());
}

TEST(JournalRecord, ComesBack) {
  for (uint64_t n = 0; n < 50; ++n) {
    const Record record = MakeRecord(n);
    const std::vector<uint8_t> bytes = Joined(EncodeRecord(record, 7, 4711));
    EXPECT_EQ(bytes.size() % kAlignment, 0u);
    const auto header = DecodeRecordHeader(std::span(bytes).first(kRecordHeaderBytes));
    ASSERT_TRUE(header.ok()) << header.status();
    EXPECT_EQ(header->sequence, 7u);
    EXPECT_EQ(header->synced, 4711u);
    const auto decoded = Decode(bytes);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    ExpectSame(record, *decoded);
  }
}

TEST(JournalRecord, AnyFlippedBitIsFound) {
  const std::vector<uint8_t> bytes = Joined(EncodeRecord(MakeRecord(5, 40), 1, 64));
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    std::vector<uint8_t> damaged = bytes;
    damaged[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
    EXPECT_FALSE(Decode(damaged).ok()) << bit;
  }
  SegmentHeader header{3, 1, kIdentity, 5};
  const std::vector<uint8_t> good = EncodeSegmentHeader(header);
  ASSERT_TRUE(DecodeSegmentHeader(good).ok());
  for (size_t bit = 0; bit < good.size() * 8; ++bit) {
    std::vector<uint8_t> damaged = good;
    damaged[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
    EXPECT_FALSE(DecodeSegmentHeader(damaged).ok()) << bit;
  }
}

TEST(JournalRecord, AnyCutIsFound) {
  const std::vector<uint8_t> bytes = Joined(EncodeRecord(MakeRecord(4, 40), 1, 64));
  for (size_t n = 0; n < bytes.size(); ++n) EXPECT_FALSE(Decode(std::span(bytes).first(n)).ok()) << n;
}

}  // namespace
}  // namespace gradwire::journal

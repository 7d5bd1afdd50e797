// Frames: what is written is read back; whatever is damaged is refused without reading out of bounds.
#include "common/wire/frame.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <numeric>
#include <random>
#include <sstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/base/crc32c.h"

namespace gradwire::wire {
namespace {

FrameHeader SomeHeader() {
  FrameHeader h;
  h.kind = FrameKind::kPush;
  h.bucket = 3;
  h.shard = 1;
  h.round = 42;
  h.shape_digest = 0xAABBCCDD;
  h.incarnation = 0x1122334455667788;
  h.plan_digest = 0x99;
  return h;
}

std::vector<uint8_t> Bits(size_t n) {
  std::vector<uint8_t> v(n);
  std::iota(v.begin(), v.end(), uint8_t{1});
  return v;
}

std::vector<Bytes> SomeFrame(size_t chunk_bytes = kDefaultChunkBytes) {
  FrameWriter writer(SomeHeader(), chunk_bytes);
  const float rate = 0.5f;
  writer.Add({SegmentType::kLearningRates, 0, 0, 1, 4}, &rate);
  for (uint32_t i = 0; i < 5; ++i) {
    const auto payload = Bits(100 + i);
    writer.Add({SegmentType::kCells, 1, i * 1000, 100 + i, 100 + i}, payload.data());
  }
  return writer.Finish();
}

std::vector<uint8_t> ToVector(const Bytes& b) { return {b.data(), b.data() + b.size()}; }

TEST(Frame, RoundTripsInOneChunk) {
  const auto chunks = SomeFrame();
  ASSERT_EQ(chunks.size(), 1u);
  const auto parsed = ParseFrame(chunks);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  const FrameHeader& h = (*parsed)[0].header;
  EXPECT_EQ(h.kind, FrameKind::kPush);
  EXPECT_EQ(h.flags, kLastChunk);
  EXPECT_EQ(h.bucket, 3u);
  EXPECT_EQ(h.shard, 1u);
  EXPECT_EQ(h.round, 42u);
  EXPECT_EQ(h.shape_digest, 0xAABBCCDDu);
  EXPECT_EQ(h.incarnation, 0x1122334455667788u);
  EXPECT_EQ(h.plan_digest, 0x99u);
  ASSERT_EQ((*parsed)[0].segments.size(), 6u);
  const Segment& s = (*parsed)[0].segments[3];
  EXPECT_EQ(s.type, SegmentType::kCells);
  EXPECT_EQ(s.begin, 2000u);
  EXPECT_EQ(s.count, 102u);
  EXPECT_EQ(std::vector<uint8_t>(s.data, s.data + s.bytes), Bits(102));
  EXPECT_EQ((s.data - chunks[0].data()) % 8, 0);
}

TEST(Frame, SplitsIntoChunks) {
  const auto chunks = SomeFrame(300);
  ASSERT_GT(chunks.size(), 2u);
  for (const Bytes& c : chunks) EXPECT_LE(c.size(), 300u);
  const auto parsed = ParseFrame(chunks);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  size_t segments = 0;
  for (const Chunk& c : *parsed) segments += c.segments.size();
  EXPECT_EQ(segments, 6u);
}

// The bytes are those of a frame that has copied its payloads.
TEST(Frame, BorrowedPayloadsStayWhereTheyAre) {
  const std::vector<uint8_t> small = Bits(20), large = Bits(1001);
  const auto owner = std::make_shared<int>(1);
  const auto write = [&](bool borrow) {
    FrameWriter writer(SomeHeader(), 1200);
    const auto add = [&](const SegmentHeader& header, const std::vector<uint8_t>& payload) {
      borrow&& payload.size() > 100 ? writer.Borrow(header, owner, payload.data()) : writer.Add(header, payload.data());
    };
    add({SegmentType::kCells, 1, 0, 20, 20}, small);
    for (uint32_t i = 0; i < 3; ++i) add({SegmentType::kCells, 1, 1000 * (i + 1), 1001, 1001}, large);
    add({SegmentType::kCells, 1, 5000, 20, 20}, small);
    return writer.Finish();
  };
  const std::vector<Bytes> copied = write(false), borrowed = write(true);
  EXPECT_EQ(owner.use_count(), 1 + 3) << "kept by the frame";
  std::vector<Bytes> chunks;
  for (std::span<const Bytes> left = borrowed; !left.empty();) {
    const size_t pieces = PiecesOfChunk(left);
    ASSERT_LE(pieces, left.size());
    if (pieces > 1) {
      EXPECT_EQ(left[1].data(), large.data());
    }
    chunks.push_back(Flatten(left.first(pieces)));
    left = left.subspan(pieces);
  }
  ASSERT_EQ(chunks.size(), 4u);  // nothing follows a borrowed payload in its chunk
  const auto parsed = ParseFrame(chunks), expected = ParseFrame(copied);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  ASSERT_TRUE(expected.ok());
  const auto payloads = [](const std::vector<Chunk>& frame) {
    std::vector<std::pair<uint64_t, std::vector<uint8_t>>> all;
    for (const Chunk& chunk : frame)
      for (const Segment& s : chunk.segments) all.push_back({s.begin, {s.data, s.data + s.bytes}});
    return all;
  };
  EXPECT_EQ(payloads(*parsed), payloads(*expected));
  for (const Bytes& chunk : copied) EXPECT_EQ(PiecesOfChunk({&chunk, 1}), 1u);
}

TEST(Frame, ChunksAreCompletedAsTheyAreSent) {
  const std::vector<uint8_t> payload = Bits(1000);
  FrameWriter writer(SomeHeader(), 1200);
  writer.Add({SegmentType::kCells, 1, 0, 20, 20}, payload.data());
  for (uint32_t i = 1; i < 4; ++i)
    writer.Borrow({SegmentType::kCells, 1, 1000 * i, 1000, 1000}, nullptr, payload.data());
  writer.Add({SegmentType::kCells, 1, 5000, 20, 20}, payload.data());
  FrameToSend frame = writer.FinishToSend();
  const std::vector<Bytes>& pieces = frame.pieces();
  ASSERT_EQ(pieces.size(), 7u);  // the first chunk has the small segment and a borrowed payload
  const auto chunk_at = [&](size_t piece, size_t count) { return Flatten(std::span(pieces).subspan(piece, count)); };
  EXPECT_EQ(ParseChunk(chunk_at(2, 2)).status().code(), absl::StatusCode::kDataLoss) << "nobody has read its payload";
  std::vector<std::thread> senders;  // of several pullers
  for (int i = 0; i < 4; ++i) senders.emplace_back([&] { frame.Complete(1); });
  for (std::thread& sender : senders) sender.join();
  EXPECT_TRUE(ParseChunk(chunk_at(2, 2)).ok());
  EXPECT_FALSE(ParseChunk(chunk_at(4, 2)).ok());
  frame.Complete(0);
  frame.Complete(3);  // nothing is late there
  std::vector<Bytes> chunks;
  const std::vector<Bytes> all = std::move(frame).Take();
  for (std::span<const Bytes> left = all; !left.empty(); left = left.subspan(PiecesOfChunk(left)))
    chunks.push_back(Flatten(left.first(PiecesOfChunk(left))));
  EXPECT_EQ(chunks.size(), 4u);
  EXPECT_TRUE(ParseFrame(chunks).ok());
}

TEST(Frame, EmptyFrameIsOneChunk) {
  FrameHeader h = SomeHeader();
  h.flags = kAbstain;
  const auto chunks = FrameWriter(h).Finish();
  ASSERT_EQ(chunks.size(), 1u);
  EXPECT_EQ(chunks[0].size(), kHeaderBytes);
  const auto parsed = ParseFrame(chunks);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ((*parsed)[0].header.flags, kAbstain | kLastChunk);
}

TEST(Frame, SaysWhichRoundsWereSkipped) {
  FrameHeader h = SomeHeader();
  h.kind = FrameKind::kUpdate;
  h.flags = kNonFinite;
  h.nonfinite_rounds = 0x01020304;
  const auto chunks = FrameWriter(h).Finish();
  const auto parsed = ParseFrame(chunks);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ((*parsed)[0].header.flags, kNonFinite | kLastChunk);
  EXPECT_EQ((*parsed)[0].header.nonfinite_rounds, 0x01020304u);
  EXPECT_EQ(ToVector(chunks[0])[52], 0x04);
}

TEST(Frame, EveryFlippedBitIsRefused) {
  const std::vector<uint8_t> good = ToVector(SomeFrame()[0]);
  for (size_t bit = 0; bit < good.size() * 8; ++bit) {
    std::vector<uint8_t> bad = good;
    bad[bit / 8] = static_cast<uint8_t>(bad[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_FALSE(ParseChunk(Bytes::FromVector(bad)).ok()) << "bit " << bit;
  }
}

TEST(Frame, EveryTruncationIsRefused) {
  const std::vector<uint8_t> good = ToVector(SomeFrame()[0]);
  for (size_t size = 0; size < good.size(); ++size) {
    EXPECT_FALSE(ParseChunk(Bytes::FromVector({good.begin(), good.begin() + static_cast<ptrdiff_t>(size)})).ok())
        << size;
  }
}

TEST(Frame, TypesThatNobodyWritesAreRefusedAndNamed) {
  for (const int type : {0, 18, 19, 21, 23, 255}) {
    FrameWriter writer({});
    writer.Add({static_cast<SegmentType>(type), 0, 0, 0, 0}, nullptr);
    const absl::StatusOr<Chunk> chunk = ParseChunk(writer.Finish()[0]);
    EXPECT_EQ(chunk.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(chunk.status().message()), testing::HasSubstr(absl::StrCat("unknown type ", type)));
  }
}

TEST(Frame, TrailingBytesAreRefused) {
  std::vector<uint8_t> long_one = ToVector(SomeFrame()[0]);
  long_one.resize(long_one.size() + 8);
  EXPECT_FALSE(ParseChunk(Bytes::FromVector(long_one)).ok());
}

TEST(Frame, RandomBytesBehindAValidHeaderAreRefused) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 2000; ++trial) {
    std::vector<uint8_t> bytes = ToVector(SomeFrame()[0]);
    for (size_t i = kHeaderBytes; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(random());
    EXPECT_FALSE(ParseChunk(Bytes::FromVector(bytes)).ok());
  }
}

TEST(Frame, ReorderedOrMissingChunksAreRefused) {
  auto chunks = SomeFrame(300);
  std::swap(chunks[0], chunks[1]);
  EXPECT_FALSE(ParseFrame(chunks).ok());
  std::swap(chunks[0], chunks[1]);
  chunks.pop_back();
  EXPECT_FALSE(ParseFrame(chunks).ok());
  EXPECT_FALSE(ParseFrame({}).ok());
}

TEST(Frame, OversizedChunkIsRefused) {
  EXPECT_FALSE(ParseChunk(Bytes::FromVector(std::vector<uint8_t>(kMaxChunkBytes + 1))).ok());
}

std::vector<Bytes> CutAnywhere(const std::vector<uint8_t>& bytes, std::mt19937& random) {
  const Bytes whole = Bytes::FromVector(bytes);
  std::vector<Bytes> slices;
  for (size_t begin = 0; begin < whole.size();) {
    const size_t size =
        std::min<size_t>(random() % 90, whole.size() - begin);  // often within a header, sometimes empty
    slices.push_back(whole.Slice(begin, size));
    begin += size;
  }
  return slices;
}

TEST(Frame, AChunkInSlicesIsParsedLikeAWholeOne) {
  std::mt19937 random(11);
  std::vector<uint8_t> scratch;
  for (int trial = 0; trial < 300; ++trial) {
    const std::vector<uint8_t> good = ToVector(SomeFrame()[0]);
    const auto whole = ParseChunk(Bytes::FromVector(good));
    const auto sliced = ParseReceived(CutAnywhere(good, random), &scratch);
    ASSERT_TRUE(sliced.ok()) << sliced.status();
    ASSERT_EQ(sliced->segments.size(), whole->segments.size());
    for (size_t i = 0; i < whole->segments.size(); ++i) {
      EXPECT_TRUE(std::ranges::equal(sliced->segments[i].payload(), whole->segments[i].payload()));
    }
    EXPECT_EQ(ToVector(sliced->bytes), good);
    std::vector<uint8_t> bad = good;
    const size_t bit = random() % (bad.size() * 8);
    bad[bit / 8] = static_cast<uint8_t>(bad[bit / 8] ^ (1 << (bit % 8)));
    const absl::Status refused = ParseReceived(CutAnywhere(bad, random), &scratch).status();
    EXPECT_EQ(refused, ParseChunk(Bytes::FromVector(bad)).status()) << "bit " << bit;
    EXPECT_FALSE(refused.ok()) << "bit " << bit;
    bad.resize(random() % good.size());
    EXPECT_EQ(ParseReceived(CutAnywhere(bad, random), &scratch).status(), ParseChunk(Bytes::FromVector(bad)).status());
  }
}

TEST(Frame, FlattenJoinsSlices) {
  const std::vector<Bytes> slices = {Bytes::FromString("ab"), Bytes::FromString(""), Bytes::FromString("cde")};
  const Bytes flat = Flatten(slices);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(flat.data()), flat.size()), "abcde");
  EXPECT_EQ(Flatten({}).size(), 0u);
}

// The worked example of proto/WIRE.md. If this changes, so must the version.
TEST(Frame, MatchesTheWorkedExampleOfTheSpec) {
  FrameWriter writer(SomeHeader());
  const float rate = 0.5f;
  writer.Add({SegmentType::kLearningRates, 0, 0, 1, 4}, &rate);
  const Bytes bytes = writer.Finish()[0];
  std::ostringstream hex;
  for (size_t i = 0; i < bytes.size(); ++i) {
    static constexpr char kDigits[] = "0123456789abcdef";
    hex << kDigits[bytes.data()[i] >> 4] << kDigits[bytes.data()[i] & 15];
  }
  EXPECT_EQ(hex.str(),
            "47574631"  // magic
            "01"
            "01"
            "0100"      // version, kind push, last chunk
            "03000000"  // bucket 3
            "0100"
            "0100"              // shard 1, one segment
            "2a00000000000000"  // round 42
            "00000000"          // chunk 0
            "ddccbbaa"          // shape digest
            "20000000"          // 32 bytes of body
            "00000000"          // contributors
            "8877665544332211"  // incarnation
            "99000000"          // plan digest
            "0000000000000000"  // reserved
            "3228db76"          // CRC-32C of the 60 bytes before
            "01"
            "00"
            "0000"              // learning rates
            "04000000"          // 4 bytes
            "0000000000000000"  // begin
            "01000000"          // count
            "26f877c4"          // CRC-32C of the 20 bytes before and the payload
            "0000003f"          // 0.5
            "00000000");        // padding
}

}  // namespace
}  // namespace gradwire::wire

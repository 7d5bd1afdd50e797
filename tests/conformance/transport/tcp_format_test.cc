// The bytes of tcp:// as proto/TCP.md says them, and their reader.
#include "common/transport/asio/tcp_format.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/crc32c.h"
#include "common/transport/asio/message_reader.h"

namespace gradwire::transport::tcp {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Text(std::span<const uint8_t> bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

std::string PacketBytes(PacketType type, const std::string& control, const std::string& body) {
  const Bytes part = Bytes::FromString(body);
  return Text(StoreHeader({type, absl::StatusCode::kOk, static_cast<uint32_t>(control.size()),
                           static_cast<uint32_t>(body.size()), PartsCheck(type, control, {&part, 1})})) +
         control + body;
}

std::string BodyOf(const Packet& packet) {
  std::string body;
  for (const Bytes& slice : packet.body) body += Text(slice.span());
  return body;
}

// Everything in `bytes`, `step` of them at a time; where it ends, the error.
absl::Status ReadAll(MessageReader& reader, const std::string& bytes, size_t step, std::vector<Packet>* packets) {
  for (size_t at = 0; at < bytes.size();) {
    size_t n = 0;
    for (std::span<uint8_t> space : reader.Space()) {
      const size_t part = std::min({space.size(), step - n, bytes.size() - at});
      std::copy_n(bytes.data() + at, part, space.data());
      at += part;
      n += part;
      if (part < space.size()) break;
    }
    reader.Filled(n);
    for (;;) {
      absl::StatusOr<std::optional<Packet>> packet = reader.Next();
      if (!packet.ok()) return packet.status();
      if (!packet->has_value()) break;
      packets->push_back(**std::move(packet));
    }
  }
  return absl::OkStatus();
}

TEST(TcpFormat, PrefaceAsSpecified) {
  EXPECT_THAT(StorePreface(), ElementsAre('G', 'W', 'I', 'R', 'E', 'T', 'C', 'P', 2, 0, 2, 0, 0xB5, 0x4A, 0xD2, 0xCF));
}

TEST(TcpFormat, HeaderAsSpecified) {
  const auto bytes = StoreHeader(
      {PacketType::kStatus, absl::StatusCode::kNotFound, 0x0304, 0, PartsCheck(PacketType::kStatus, "abc", {})});
  EXPECT_THAT(std::vector<uint8_t>(bytes.begin(), bytes.begin() + 12),
              ElementsAre(6, 5, 0, 0, 0x04, 0x03, 0, 0, 0, 0, 0, 0));
  // CRC-32C of "abc", then that of those sixteen bytes.
  EXPECT_THAT(std::vector<uint8_t>(bytes.begin() + 12, bytes.end()),
              ElementsAre(0xB7, 0x3F, 0x4B, 0x36, 0x87, 0x11, 0x60, 0x08));
}

TEST(TcpFormat, EveryFlippedBitOfAHeaderIsFound) {
  const auto good = StoreHeader({PacketType::kMessage, absl::StatusCode::kOk, 100, 1 << 20, 7});
  ASSERT_TRUE(LoadHeader(good).ok());
  for (size_t bit = 0; bit < 8 * kHeaderBytes; ++bit) {
    auto bad = good;
    bad[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
    EXPECT_TRUE(absl::IsDataLoss(LoadHeader(bad).status())) << "bit " << bit;
  }
}

TEST(TcpFormat, RefusesWhatIsNotInTheTables) {
  const auto load = [](PacketType type, absl::StatusCode code, uint32_t control, uint32_t body) {
    return LoadHeader(StoreHeader({type, code, control, body, 0})).status();
  };
  const absl::StatusCode ok = absl::StatusCode::kOk;
  EXPECT_TRUE(absl::IsInvalidArgument(load(static_cast<PacketType>(0), ok, 0, 0)));
  EXPECT_TRUE(absl::IsInvalidArgument(load(static_cast<PacketType>(8), ok, 0, 0)));
  EXPECT_TRUE(absl::IsInvalidArgument(load(PacketType::kMessage, absl::StatusCode::kInternal, 0, 0)));
  EXPECT_TRUE(absl::IsInvalidArgument(load(PacketType::kStatus, static_cast<absl::StatusCode>(17), 0, 0)));
  EXPECT_TRUE(absl::IsInvalidArgument(load(PacketType::kStatus, ok, 0, 1)));
  EXPECT_TRUE(absl::IsInvalidArgument(load(PacketType::kHalfClose, ok, 1, 0)));
  EXPECT_TRUE(absl::IsInvalidArgument(load(PacketType::kMessage, ok, kMaxControlBytes + 1, 0)));
  EXPECT_TRUE(load(PacketType::kMessage, ok, kMaxControlBytes, UINT32_MAX).ok());
}

// A preface of other versions; 1 had no check.
std::array<uint8_t, kPrefaceBytes> PrefaceOf(uint8_t version, uint8_t oldest) {
  auto preface = StorePreface();
  preface[8] = version;
  preface[10] = oldest;
  const uint32_t crc = version == 1 ? 0 : Crc32c({preface.data(), 12});
  std::memcpy(preface.data() + 12, &crc, sizeof(crc));
  return preface;
}

TEST(TcpFormat, PrefaceOfOtherVersions) {
  EXPECT_TRUE(CheckPreface(PrefaceOf(9, 2)).ok()) << "newer, but still speaks ours";
  const absl::Status newer = CheckPreface(PrefaceOf(9, 3));
  EXPECT_TRUE(absl::IsFailedPrecondition(newer));
  EXPECT_THAT(std::string(newer.message()), HasSubstr("versions 3 to 9"));
  const absl::Status older = CheckPreface(PrefaceOf(1, 1));
  EXPECT_TRUE(absl::IsFailedPrecondition(older)) << older;
  EXPECT_THAT(std::string(older.message()), HasSubstr("versions 1 to 1"));
}

TEST(TcpFormat, EveryFlippedBitOfAPrefaceIsDamage) {
  for (size_t bit = 0; bit < 8 * kPrefaceBytes; ++bit) {
    auto bad = StorePreface();
    bad[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
    EXPECT_TRUE(absl::IsDataLoss(CheckPreface(bad))) << "bit " << bit;
  }
}

// What is held of a body must not hold a control part with it, which nobody counts.
TEST(MessageReader, ABodyBehindALargeControlPartHasMemoryOfItsOwn) {
  for (const size_t body_bytes : {size_t{1}, size_t{64}, 2 * MessageReader::kSliceBytes + 1}) {
    const std::string control(kMaxControlBytes, 'c');
    std::string body(body_bytes, 'b');
    body.back() = 'e';
    for (const size_t step : {size_t{1000}, size_t{1} << 16, size_t{4} << 20}) {
      MessageReader reader(std::make_shared<BufferPool>(), 8 << 20);
      std::vector<Packet> packets;
      const std::string bytes = Text(StorePreface()) + PacketBytes(PacketType::kMessage, control, body);
      ASSERT_TRUE(ReadAll(reader, bytes + bytes.substr(kPrefaceBytes), step, &packets).ok());
      ASSERT_EQ(packets.size(), 2u);
      for (const Packet& packet : packets) {
        EXPECT_TRUE(packet.control == control);
        EXPECT_TRUE(BodyOf(packet) == body);
        EXPECT_LE(packet.body[0].size(), MessageReader::kSliceBytes);
      }
    }
    const auto pool = std::make_shared<BufferPool>();
    MessageReader reader(pool, 8 << 20);
    std::vector<Packet> packets;
    const std::string half = PacketBytes(PacketType::kMessage, control, body).substr(0, control.size() / 2);
    ASSERT_TRUE(ReadAll(reader, Text(StorePreface()) + half, 4096, &packets).ok());
    EXPECT_EQ(pool->held_bytes(), control.size()) << "no room for the body beside it";
  }
}

TEST(MessageReader, EveryFlippedBitOutsideOfAFrameIsFound) {
  const std::string good = PacketBytes(PacketType::kMessage, "control", "frame") +
                           PacketBytes(PacketType::kCall, "method", "request") +
                           PacketBytes(PacketType::kStatus, "message", "");
  const size_t frame = kHeaderBytes + 7;
  for (size_t bit = 0; bit < 8 * good.size(); ++bit) {
    if (bit / 8 >= frame && bit / 8 < frame + 5) continue;
    std::string bad = good;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << (bit % 8)));
    MessageReader reader(std::make_shared<BufferPool>(), 1 << 20);
    std::vector<Packet> packets;
    EXPECT_TRUE(absl::IsDataLoss(ReadAll(reader, Text(StorePreface()) + bad, 4096, &packets))) << "bit " << bit;
  }
}

TEST(MessageReader, SaysWhatItHoldsOfMessagesInPart) {
  auto pool = std::make_shared<BufferPool>();
  const std::string bytes = PacketBytes(PacketType::kMessage, "c", std::string(3 << 20, 'b'));
  std::vector<Packet> packets;
  MessageReader first(pool, 8 << 20), second(pool, 8 << 20);
  ASSERT_TRUE(ReadAll(first, Text(StorePreface()) + bytes.substr(0, bytes.size() / 2), 65536, &packets).ok());
  ASSERT_TRUE(ReadAll(second, Text(StorePreface()) + bytes.substr(0, 100), 65536, &packets).ok());
  EXPECT_LT(first.turn(), second.turn());
  EXPECT_GE(first.held_bytes(), size_t{2} << 20);
  EXPECT_EQ(pool->held_bytes(), first.held_bytes() + second.held_bytes());
  ASSERT_TRUE(ReadAll(first, bytes.substr(bytes.size() / 2), 65536, &packets).ok());
  EXPECT_EQ(packets.size(), 1u);
  EXPECT_EQ(first.held_bytes(), 0u);
  EXPECT_EQ(first.turn(), 0u);
  second.Discard();
  EXPECT_EQ(pool->held_bytes(), 0u);
}

TEST(MessageReader, AnySlicingGivesTheSamePackets) {
  constexpr size_t kSlice = MessageReader::kSliceBytes;
  const size_t bodies[] = {0, 1, 100, 4000, 4064, 4065, 4096, 5000, 70000, kSlice - 1, kSlice, kSlice + 1, 3 * kSlice};
  std::string bytes = Text(StorePreface());
  for (size_t body : bodies) {
    for (size_t control : {size_t{0}, size_t{16}, size_t{5000}}) {
      std::string text(body, 'x');
      for (size_t i = 0; i < body; ++i) text[i] = static_cast<char>(i * 131 + body);
      bytes += PacketBytes(PacketType::kMessage, std::string(control, 'c'), text);
    }
  }
  for (size_t step : {size_t{1000003}, size_t{65536}, size_t{4096}, size_t{1000}, size_t{17}}) {
    MessageReader reader(std::make_shared<BufferPool>(), 8 * kSlice);
    std::vector<Packet> packets;
    ASSERT_TRUE(ReadAll(reader, bytes, step, &packets).ok()) << step;
    std::string again = Text(StorePreface());
    for (const Packet& packet : packets) {
      again += PacketBytes(PacketType::kMessage, packet.control, BodyOf(packet));
      for (const Bytes& slice : packet.body) EXPECT_LE(slice.size(), kSlice);
    }
    EXPECT_EQ(packets.size(), std::size(bodies) * 3) << step;
    EXPECT_TRUE(again == bytes) << step;
  }
}

TEST(MessageReader, RefusesAMessageAboveItsLimitByItsHeader) {
  MessageReader reader(std::make_shared<BufferPool>(), 1000);
  std::vector<Packet> packets;
  const std::string header = PacketBytes(PacketType::kMessage, "c", std::string(1000, 'b')).substr(0, kHeaderBytes);
  EXPECT_TRUE(absl::IsResourceExhausted(ReadAll(reader, Text(StorePreface()) + header, 4096, &packets)));
}

TEST(BufferPool, HandsOutWhatCameBackLast) {
  auto pool = std::make_shared<BufferPool>();
  std::shared_ptr<uint8_t> first = pool->Take(300 << 10);
  std::shared_ptr<uint8_t> second = pool->Take(300 << 10);
  const uint8_t* hot = second.get();
  EXPECT_NE(first.get(), hot);
  first.reset();
  second.reset();
  EXPECT_EQ(pool->Take(310 << 10).get(), hot);
  std::shared_ptr<uint8_t> survivor = pool->Take(1 << 20);
  pool.reset();
  survivor.get()[(1 << 20) - 1] = 1;
}

}  // namespace
}  // namespace gradwire::transport::tcp

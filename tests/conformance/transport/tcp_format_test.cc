// The bytes of tcp:// as proto/TCP.md says them, and their reader.
#include "common/transport/asio/tcp_format.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/transport/asio/message_reader.h"

namespace gradwire::transport::tcp {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Text(std::span<const uint8_t> bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

std::string PacketBytes(PacketType type, const std::string& control, const std::string& body) {
  return Text(StoreHeader({type, absl::StatusCode::kOk, static_cast<uint32_t>(control.size()),
                           static_cast<uint32_t>(body.size())})) +
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
  EXPECT_THAT(StorePreface(), ElementsAre('G', 'W', 'I', 'R', 'E', 'T', 'C', 'P', 1, 0, 1, 0, 0, 0, 0, 0));
}

TEST(TcpFormat, HeaderAsSpecified) {
  const auto bytes = StoreHeader({PacketType::kStatus, absl::StatusCode::kNotFound, 0x0304, 0});
  EXPECT_THAT(std::vector<uint8_t>(bytes.begin(), bytes.begin() + 12),
              ElementsAre(6, 5, 0, 0, 0x04, 0x03, 0, 0, 0, 0, 0, 0));
  // CRC-32C of those twelve bytes.
  EXPECT_THAT(std::vector<uint8_t>(bytes.begin() + 12, bytes.end()), ElementsAre(0xEF, 0x7F, 0x32, 0xD4));
}

TEST(TcpFormat, EveryFlippedBitOfAHeaderIsFound) {
  const auto good = StoreHeader({PacketType::kMessage, absl::StatusCode::kOk, 100, 1 << 20});
  ASSERT_TRUE(LoadHeader(good).ok());
  for (size_t bit = 0; bit < 8 * kHeaderBytes; ++bit) {
    auto bad = good;
    bad[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
    EXPECT_TRUE(absl::IsDataLoss(LoadHeader(bad).status())) << "bit " << bit;
  }
}

TEST(TcpFormat, RefusesWhatIsNotInTheTables) {
  const auto load = [](PacketType type, absl::StatusCode code, uint32_t control, uint32_t body) {
    return LoadHeader(StoreHeader({type, code, control, body})).status();
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

TEST(TcpFormat, PrefaceOfOtherVersions) {
  auto preface = StorePreface();
  preface[8] = 9;  // newer, but still speaks ours
  EXPECT_TRUE(CheckPreface(preface).ok());
  preface[10] = 2;  // and no more
  const absl::Status status = CheckPreface(preface);
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("versions 2 to 9"));
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

// Messages to gRPC buffers and back: same bytes, no copies of large frames, nothing read past the end.
#include "common/transport/grpc/message_codec.h"

#include <grpcpp/support/slice.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace gradwire::transport {
namespace {

::grpc::ByteBuffer Split(const std::string& bytes, const std::vector<size_t>& cuts) {
  std::vector<::grpc::Slice> slices;
  size_t begin = 0;
  for (size_t cut : cuts) {
    slices.emplace_back(bytes.substr(begin, cut - begin));
    begin = cut;
  }
  slices.emplace_back(bytes.substr(begin));
  return ::grpc::ByteBuffer(slices.data(), slices.size());
}

std::string FrameOf(const Message& message) {
  std::string out;
  for (const Bytes& b : message.frame) out.append(reinterpret_cast<const char*>(b.data()), b.size());
  return out;
}

TEST(MessageCodec, AnySizeComesBack) {
  for (const std::string& control : {std::string(), std::string("\x0A\0", 2), "\x0A\xAC\x02" + std::string(300, 'c')}) {
    for (size_t frame : {0u, 1u, 127u, 128u, 4095u, 4096u, 16384u, 3000000u}) {
      for (const std::optional<uint64_t> number : {std::optional<uint64_t>(), std::optional<uint64_t>(7)}) {
        const Message message{control, {Bytes::FromString(std::string(frame, 'f'))}};
        const ::grpc::ByteBuffer buffer = EncodeMessage(message, number);
        const size_t before_frame = frame == 0 ? 0 : frame < 128 ? 2 : frame < 16384 ? 3 : frame < 2097152 ? 4 : 5;
        EXPECT_EQ(buffer.Length(), control.size() + (number ? kCheckBytes : 0) + before_frame + frame);
        const auto back = DecodeMessage(buffer, number);
        ASSERT_TRUE(back.ok()) << back.status();
        EXPECT_EQ(back->control, control);
        EXPECT_EQ(FrameOf(*back), FrameOf(message));
      }
    }
  }
}

TEST(MessageCodec, LargeFramesAreNotCopied) {
  Message message;
  message.frame.push_back(Bytes::FromString(std::string(100000, 'f')));
  const uint8_t* data = message.frame[0].data();
  const ::grpc::ByteBuffer buffer = EncodeMessage(std::move(message));
  auto decoded = DecodeMessage(buffer);
  ASSERT_TRUE(decoded.ok());
  ASSERT_EQ(decoded->frame.size(), 1u);
  EXPECT_EQ(decoded->frame[0].data(), data);
}

TEST(MessageCodec, AnySplitDecodesAlike) {
  const std::string control =
      "\x08\x96\x01\x11"
      "12345678"
      "\x1D"
      "1234"
      "\x22\x03"
      "abc";
  const std::string frame(200, 'f');
  const std::string bytes = control + "\x7A\xC8\x01" + frame;
  for (size_t a = 0; a <= 40; ++a) {
    for (size_t b = a; b <= 40; ++b) {
      auto message = DecodeMessage(Split(bytes, {a, b}));
      ASSERT_TRUE(message.ok()) << message.status();
      EXPECT_EQ(message->control, control);
      EXPECT_EQ(FrameOf(*message), frame);
    }
  }
}

TEST(MessageCodec, TruncationNeverReadsPastTheEnd) {
  const std::string bytes = std::string(
                                "\x08\x96\x01\x22\x03"
                                "abc") +
                            "\x7A\x05"
                            "frame";
  size_t accepted = 0;
  for (size_t n = 0; n < bytes.size(); ++n) accepted += DecodeMessage(Split(bytes.substr(0, n), {})).ok();
  EXPECT_EQ(accepted, 3u);  // nothing, after field 1, after field 4
}

TEST(MessageCodec, RandomBytesDecodeOrAreRefused) {
  const uint32_t seed = 20240;
  std::mt19937 random(seed);
  for (int i = 0; i < 20000; ++i) {
    std::string bytes(random() % 24, '\0');
    for (char& c : bytes) c = static_cast<char>(random() % 3 == 0 ? 0x7A : random());
    auto message = DecodeMessage(Split(bytes, {bytes.size() / 2}));
    if (!message.ok()) {
      EXPECT_EQ(message.status().code(), absl::StatusCode::kInvalidArgument);
    } else {
      EXPECT_LE(message->control.size() + FrameOf(*message).size(), bytes.size()) << "seed " << seed;
    }
  }
}

TEST(MessageCodec, EmptyBuffer) {
  auto message = DecodeMessage(::grpc::ByteBuffer());
  ASSERT_TRUE(message.ok());
  EXPECT_TRUE(message->control.empty());
  EXPECT_TRUE(message->frame.empty());
  EXPECT_EQ(ToString(FromString("")), "");
}

TEST(MessageCodec, EveryFlippedBitBesideTheFrameFailsTheCheck) {
  Message message{
      "\x0A\x07"
      "control",
      {Bytes::FromString("frame")}};
  ::grpc::Slice all;
  ASSERT_TRUE(EncodeMessage(message, 3).DumpToSingleSlice(&all).ok());
  const std::string bytes(reinterpret_cast<const char*>(all.begin()), all.size());
  const auto decode = [](const std::string& of, uint64_t number) {
    ::grpc::Slice slice(of);
    return DecodeMessage(::grpc::ByteBuffer(&slice, 1), number);
  };
  ASSERT_TRUE(decode(bytes, 3).ok());
  EXPECT_EQ(decode(bytes, 3)->control, std::string("\x0A\x07"
                                                   "control"));
  EXPECT_TRUE(absl::IsDataLoss(decode(bytes, 4).status())) << "one was lost before it";
  for (size_t bit = 0; bit < 8 * (bytes.size() - 5); ++bit) {
    std::string bad = bytes;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_TRUE(absl::IsDataLoss(decode(bad, 3).status())) << "bit " << bit;
  }
}

TEST(MessageCodec, SignsOfLifeCountMessages) {
  EXPECT_TRUE(IsAlive(AliveMessage(7)));
  EXPECT_TRUE(CheckAlive(AliveMessage(7), 7).ok());
  EXPECT_TRUE(absl::IsDataLoss(CheckAlive(AliveMessage(8), 7)));
  EXPECT_FALSE(IsAlive(EncodeMessage(Message(), 0)));
}

}  // namespace
}  // namespace gradwire::transport

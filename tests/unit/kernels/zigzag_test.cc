// Packed codes against single bits, for every width and length, by both ways.
#include "kernels/cpu/zigzag.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

namespace gradwire::kernels {
namespace {

// Bit by bit.
std::vector<uint8_t> Packed(const std::vector<int32_t>& values, int bits) {
  std::vector<uint8_t> out((values.size() * static_cast<size_t>(bits) + 7) / 8);
  size_t at = 0;
  for (const int32_t value : values) {
    const int64_t code = value < 0 ? -2 * int64_t{value} - 1 : 2 * int64_t{value};
    for (int bit = 0; bit < bits; ++bit, ++at) {
      out[at / 8] = static_cast<uint8_t>(out[at / 8] | (code >> bit & 1) << (at % 8));
    }
  }
  return out;
}

std::vector<int32_t> Values(size_t n, int bits, std::mt19937& random) {
  const int32_t least = -(1 << (bits - 1));
  const int32_t most = (1 << (bits - 1)) - 1;
  std::vector<int32_t> values(n);
  for (int32_t& v : values) {
    const uint32_t draw = random();
    v = draw % 5 == 0 ? least : draw % 5 == 1 ? most : std::uniform_int_distribution<int32_t>(least, most)(random);
  }
  return values;
}

using Pack = size_t (*)(std::span<const int32_t>, int, std::span<uint8_t>);
using Unpack = size_t (*)(std::span<const uint8_t>, int, size_t, int32_t*);
struct Way {
  Pack pack;
  Unpack unpack;
};

class ZigZagTest : public testing::TestWithParam<Way> {};

TEST_P(ZigZagTest, CodesAreThoseOfSingleBits) {
  std::mt19937 random(5);
  for (int bits = 1; bits <= kMostPackedBits; ++bits) {
    for (const size_t n : {0u, 1u, 7u, 8u, 9u, 16u, 40u, 255u, 256u, 1000u}) {
      SCOPED_TRACE(testing::Message() << bits << " bits, " << n << " integers");
      const std::vector<int32_t> values = Values(n, bits, random);
      const std::vector<uint8_t> expected = Packed(values, bits);
      // Memory that ends where the codes end: some are left for a slower way.
      const size_t room = 24 + 8 * 16 / static_cast<size_t>(bits);
      if (bits >= kLeastPackedBits) {
        std::vector<uint8_t> out(expected.size(), 0xEE);
        const size_t packed = GetParam().pack(values, bits, out);
        EXPECT_EQ(packed % 8, 0u);
        EXPECT_GE(packed + room, n);
        ASSERT_LE(packed, n);
        const size_t bytes = packed / 8 * static_cast<size_t>(bits);
        EXPECT_TRUE(std::equal(expected.begin(), expected.begin() + static_cast<ptrdiff_t>(bytes), out.begin()));
      }
      std::vector<int32_t> back(n, 77);
      const size_t unpacked = GetParam().unpack(expected, bits, n, back.data());
      EXPECT_EQ(unpacked % 8, 0u);
      EXPECT_GE(unpacked + room, n);
      ASSERT_LE(unpacked, n);
      EXPECT_TRUE(std::equal(back.begin(), back.begin() + static_cast<ptrdiff_t>(unpacked), values.begin()));
      EXPECT_EQ(std::count(back.begin() + static_cast<ptrdiff_t>(unpacked), back.end(), 77),
                static_cast<ptrdiff_t>(n - unpacked));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, ZigZagTest,
                         testing::Values(Way{PackZigZag, UnpackZigZag}, Way{PackZigZagByPair, UnpackZigZagByPair}),
                         [](const auto& info) { return info.index == 0 ? "Best" : "ByPair"; });

}  // namespace
}  // namespace gradwire::kernels

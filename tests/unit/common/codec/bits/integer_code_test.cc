// Coded integers: there and back at every width, in as few bytes as their entropy allows, and damaged ones refused.
#include "common/codec/bits/integer_code.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <vector>

#include "common/codec/bits/index_code.h"

namespace gradwire {
namespace {

using Integers = std::vector<int32_t>;

constexpr int32_t kLeast = std::numeric_limits<int32_t>::min();
constexpr int32_t kMost = std::numeric_limits<int32_t>::max();

void ExpectThereAndBack(const Integers& values) {
  const CodedIntegers coded = EncodeIntegers(values);
  Integers back(values.size());
  const absl::Status status = DecodeIntegers(coded.payload, coded.bits, values.size(), back.data());
  ASSERT_EQ(status, absl::OkStatus()) << values.size();
  EXPECT_EQ(back, values);
}

// Magnitudes from `least` on, each `fall` times as often as the one before.
Integers Geometric(size_t n, double fall, int32_t least, uint32_t seed) {
  std::mt19937 random(seed);
  std::geometric_distribution<int32_t> beyond(1 - fall);
  Integers values(n);
  for (int32_t& v : values) v = (least + beyond(random)) * (random() % 2 == 0 ? 1 : -1);
  return values;
}

// Bytes below which no code of independent values gets.
double EntropyBytes(const Integers& values) {
  std::map<int32_t, double> counts;
  for (const int32_t v : values) ++counts[v];
  double bits = 0;
  for (const auto& [v, count] : counts) bits -= count * std::log2(count / static_cast<double>(values.size()));
  return bits / 8;
}

TEST(CodedIntegers, ComeBackFromEveryWidth) {
  std::mt19937_64 random(3);
  for (int bits = 1; bits <= 32; ++bits) {
    for (size_t n : {1u, 2u, 7u, 8u, 9u, 255u, 256u, 1000u, 4096u}) {
      for (const int skew : {0, 1, 3, 20}) {  // the larger, the smaller most of them
        Integers values(n);
        for (int32_t& v : values) {
          v = static_cast<int32_t>(random()) >> (32 - bits);
          for (int i = 0; i < skew; ++i) v = std::min(v, static_cast<int32_t>(random()) >> (32 - bits));
        }
        ExpectThereAndBack(values);
      }
    }
  }
  ExpectThereAndBack({kLeast, kMost, 0, 1, -1, 2, -2});
  ExpectThereAndBack(Integers(100, 0));
  ExpectThereAndBack({kLeast});
  ExpectThereAndBack(Integers(3000, kLeast));
}

TEST(CodedIntegers, AreWhatTheExampleOfTheSpecificationSays) {
  const std::vector<uint8_t> payload = {0x01, 0x16, 0x0A, 0x18, 0x0A, 0x02, 0x00};
  Integers out(6);
  ASSERT_EQ(DecodeIntegers(payload, 1, out.size(), out.data()), absl::OkStatus());
  EXPECT_EQ(out, (Integers{-1, 1, 1, -2, 3, -1}));
}

TEST(CodedIntegers, AreWrittenAsTheSpecificationSays) {
  Integers values(64, -2);      // the least, 3 in zigzag
  values[3] = 2;                // code 1
  values[9] = values[20] = -3;  // 2
  values[50] = 4;               // 5
  const CodedIntegers coded = EncodeIntegers(values);
  EXPECT_EQ(coded.bits, 1);
  EXPECT_EQ(coded.payload, (std::vector<uint8_t>{3,                               // the least
                                                 0x08, 0, 0, 0, 0, 0, 0x04, 0,    // low bits
                                                 6 << 3 | 4, 9, 0, 20, 0, 50, 0,  // coordinates, of 64
                                                 1 << 3 | 2, 0b100,               // a bitmap, of 3
                                                 0}));
  ExpectThereAndBack(values);
}

TEST(CodedIntegers, OfOneMagnitudeTakeABitEach) {
  Integers signs(8000);
  for (size_t i = 0; i < signs.size(); ++i) signs[i] = i % 3 == 0 ? 1 : -1;
  const CodedIntegers coded = EncodeIntegers(signs);
  EXPECT_EQ(coded.bits, 1);
  EXPECT_EQ(coded.payload.size(), signs.size() / 8 + 2);
  ExpectThereAndBack(signs);
}

TEST(CodedIntegers, TakeHardlyMoreThanTheirEntropy) {
  for (const double fall : {0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97}) {
    for (const int32_t least : {1, 2, 67}) {
      const Integers values = Geometric(50'000, fall, least, 11);
      const double bytes = static_cast<double>(EncodeIntegers(values).payload.size());
      EXPECT_LE(bytes, 1.08 * EntropyBytes(values)) << fall;
      EXPECT_GE(bytes, 0.99 * EntropyBytes(values)) << fall;
      ExpectThereAndBack(values);
    }
  }
}

TEST(CodedIntegers, NeverTakeMuchMoreThanPackedIntegers) {
  std::mt19937 random(17);
  for (int t = 0; t < 2000; ++t) {
    Integers values(1 + random() % 300);
    const int shift = static_cast<int>(random() % 31);
    for (int32_t& v : values) {
      v = static_cast<int32_t>(random()) >> (random() % 4 == 0 ? shift : 30);
    }
    ExpectThereAndBack(values);
    EXPECT_LE(EncodeIntegers(values).payload.size(), PackedBytes(values.size(), BitsFor(values)) + 8);
  }
}

TEST(CodedIntegers, ThatAreDamagedAreRefusedOrOthers) {
  const Integers values = Geometric(400, 0.4, 1, 5);
  const CodedIntegers coded = EncodeIntegers(values);
  ASSERT_GT(coded.payload.size(), PackedBytes(values.size(), coded.bits) + 2) << "there are sets";
  Integers out(values.size());
  const auto decode = [&](std::span<const uint8_t> payload, int bits, size_t n) {
    return DecodeIntegers(payload, bits, n, out.data()).code();
  };
  for (size_t bytes = 0; bytes < coded.payload.size(); ++bytes) {
    EXPECT_EQ(decode(std::span(coded.payload).first(bytes), coded.bits, values.size()),
              absl::StatusCode::kInvalidArgument)
        << bytes;
  }
  std::vector<uint8_t> longer = coded.payload;
  longer.push_back(0);
  EXPECT_EQ(decode(longer, coded.bits, values.size()), absl::StatusCode::kInvalidArgument);
  for (const int bits : {-1, 0, 33, 255}) EXPECT_NE(decode(coded.payload, bits, values.size()), absl::StatusCode::kOk);
  std::mt19937 random(1);
  for (int t = 0; t < 20'000; ++t) {  // it never reads or writes past an end, which sanitizers see
    std::vector<uint8_t> other = coded.payload;
    for (uint32_t k = 0; k <= random() % 3; ++k)
      other[random() % other.size()] ^= static_cast<uint8_t>(1u << random() % 8);
    (void)decode(other, coded.bits, values.size());
  }
}

TEST(CodedIntegers, ThatNobodyWritesAreRefused) {
  Integers out(8);
  const auto refused = [&](std::vector<uint8_t> payload, int bits) {
    return DecodeIntegers(payload, bits, out.size(), out.data()).code() == absl::StatusCode::kInvalidArgument;
  };
  const uint8_t all = static_cast<uint8_t>(IndexCoding::kFull);
  EXPECT_FALSE(refused({1, 0x55, 0}, 1));
  EXPECT_FALSE(refused({1, 0x55, all, 0}, 1)) << "all reach the next level";
  std::vector<uint8_t> many = {1, 0x55};
  many.insert(many.end(), 6, all);
  many.push_back(0);
  EXPECT_TRUE(refused(many, 1)) << "more work than its bytes are worth";
  many.erase(many.begin() + 2);
  EXPECT_FALSE(refused(many, 1)) << "as much as there may be";
  EXPECT_TRUE(refused({1, 0x55, 7, 0}, 1)) << "no such coding";
  EXPECT_TRUE(refused({1, 0x55, 0x80, 0x80, 0x80, 0x80, 0x80, 0}, 1)) << "no such number";
  EXPECT_TRUE(refused({0x80, 0x80, 0x80, 0x80, 0x80, 1, 0x55, 0}, 1)) << "no such least code";
  EXPECT_TRUE(refused({0xFF, 0xFF, 0xFF, 0xFF, 0x0F, 0x55, 0}, 1)) << "the code behind the last one";
  EXPECT_TRUE(refused({0x80, 0x80, 0x80, 0x80, 0x10, 0x55, 0}, 1)) << "2^32 and more";
  EXPECT_FALSE(refused({0xFF, 0xFF, 0xFF, 0xFF, 0x0F, 0, 0}, 1));
  EXPECT_EQ(out[0], kLeast);
  std::vector<uint8_t> wide(33);
  std::fill_n(wide.begin() + 1, 4, 0xFF);
  wide.push_back(0);
  EXPECT_FALSE(refused(wide, 32));
  EXPECT_EQ(out[0], kLeast);
  wide.back() = all;
  wide.push_back(0);
  EXPECT_TRUE(refused(wide, 32)) << "past 32 bits";
  std::vector<uint8_t> deep = {1, 0x55};  // one element reaches 32 levels
  const std::vector<uint8_t> first = {static_cast<uint8_t>(2 << 3 | static_cast<int>(IndexCoding::kCoordinates)), 0, 0};
  for (int level = 0; level < 31; ++level) deep.insert(deep.end(), first.begin(), first.end());
  deep.push_back(0);
  EXPECT_FALSE(refused(deep, 1));
  EXPECT_EQ(out[0], 32);
  deep.pop_back();
  deep.insert(deep.end(), first.begin(), first.end());
  deep.push_back(0);
  EXPECT_TRUE(refused(deep, 1)) << "one level more than codes have";
}

}  // namespace
}  // namespace gradwire

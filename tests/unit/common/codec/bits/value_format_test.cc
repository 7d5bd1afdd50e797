// Values of sparse segments: sizes, what comes back, and refusal of everything malformed.
#include "common/codec/bits/value_format.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "common/codec/bits/integer_code.h"

namespace gradwire {
namespace {

constexpr ValueFormat kAll[] = {ValueFormat::kFp32, ValueFormat::kFp16, ValueFormat::kBf16, ValueFormat::kInt8,
                                ValueFormat::kInt6, ValueFormat::kInt4, ValueFormat::k2Bit};

std::vector<uint8_t> Written(ValueFormat format, const std::vector<float>& values) {
  std::vector<uint8_t> out(BytesOf(format, values.size()), 0xA5);
  WriteValues(format, values.data(), values.size(), out.data());
  return out;
}

std::vector<float> Read(ValueFormat format, const std::vector<uint8_t>& payload, size_t n) {
  std::vector<float> out(n, 99);
  const absl::Status status = ReadValues(format, payload, n, out.data());
  EXPECT_TRUE(status.ok()) << status;
  return out;
}

std::vector<float> ThereAndBack(ValueFormat format, const std::vector<float>& values) {
  return Read(format, Written(format, values), values.size());
}

void ExpectRefused(ValueFormat format, const std::vector<uint8_t>& payload, size_t n) {
  std::vector<float> out(n);
  EXPECT_EQ(ReadValues(format, payload, n, out.data()).code(), absl::StatusCode::kInvalidArgument);
}

double SquaredError(ValueFormat format, const std::vector<float>& values) {
  const std::vector<float> found = ThereAndBack(format, values);
  double sum = 0;
  for (size_t i = 0; i < values.size(); ++i) sum += std::pow(static_cast<double>(values[i]) - found[i], 2);
  return sum;
}

// The largest of many normal numbers, as top-k picks them.
std::vector<float> Tails(size_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> out;
  while (out.size() < n) {
    const float x = normal(random);
    if (std::fabs(x) > 2) out.push_back(x);
  }
  return out;
}

TEST(ValueFormat, NoValuesTakeNoBytes) {
  for (ValueFormat format : kAll) {
    EXPECT_EQ(BytesOf(format, 0), 0u);
    EXPECT_TRUE(ReadValues(format, {}, 0, nullptr).ok());
  }
}

TEST(ValueFormat, SizesAreThoseOfTheSpec) {
  EXPECT_EQ(BytesOf(ValueFormat::kInt4, 7), 8u);
  EXPECT_EQ(BytesOf(ValueFormat::kInt6, 4), 7u);
  EXPECT_EQ(BytesOf(ValueFormat::kInt6, 5), 8u);
  EXPECT_EQ(BytesOf(ValueFormat::k2Bit, 1), 9u);
  EXPECT_EQ(BytesOf(ValueFormat::k2Bit, 8), 10u);
  EXPECT_EQ(BytesOf(ValueFormat::k2Bit, 9), 11u);
  for (ValueFormat format : kAll) {
    const std::vector<uint8_t> payload = Written(format, Tails(9, 1));
    ExpectRefused(format, {payload.begin(), payload.end() - 1}, 9);
    ExpectRefused(format, payload, 100);
  }
}

// WIRE.md by hand: scale 2, then 31, -31, 1, -2 and 5, of six bits each.
TEST(ValueFormat, SixBitsLieAsTheSpecSays) {
  const std::vector<float> values = {62, -62, 2, -4, 10};
  const std::vector<uint8_t> written = {0, 0, 0, 0x40, 0b01'011111, 0b0001'1000, 0b111110'00, 0b00'000101};
  EXPECT_EQ(Written(ValueFormat::kInt6, values), written);
  EXPECT_EQ(Read(ValueFormat::kInt6, written, 5), values);
}

TEST(ValueFormat, IntegersAreTheNearestMultiplesOfTheirScale) {
  for (const auto& [format, largest] :
       {std::pair(ValueFormat::kInt8, 127), std::pair(ValueFormat::kInt6, 31), std::pair(ValueFormat::kInt4, 7)}) {
    for (size_t n = 1; n < 20; ++n) {
      const std::vector<float> values = Tails(n, n);
      const std::vector<float> found = ThereAndBack(format, values);
      float most = 0;
      for (float v : values) most = std::max(most, std::fabs(v));
      for (size_t i = 0; i < n; ++i) EXPECT_NEAR(found[i], values[i], 0.5001f * most / static_cast<float>(largest));
    }
    EXPECT_EQ(ThereAndBack(format, {0, -0.0f, 0}), (std::vector<float>{0, 0, 0}));
    const float huge = 0.99f * std::numeric_limits<float>::max();  // a scale rounds: senders keep below (SentLimitOf)
    for (float v : ThereAndBack(format, {huge, -huge})) EXPECT_NEAR(std::fabs(v) / huge, 1, 1e-6);
  }
}

TEST(ValueFormat, IntegersThatNobodyWritesAreRefused) {
  for (ValueFormat format : {ValueFormat::kInt8, ValueFormat::kInt6, ValueFormat::kInt4}) {
    for (float scale : {-1.0f, -0.0f, std::nanf(""), std::numeric_limits<float>::infinity()}) {
      std::vector<uint8_t> payload(BytesOf(format, 3), 0);
      std::memcpy(payload.data(), &scale, 4);
      ExpectRefused(format, payload, 3);
    }
  }
  for (ValueFormat format : {ValueFormat::kInt6, ValueFormat::kInt4}) {
    std::vector<uint8_t> payload = Written(format, {1, 1, 1});
    payload.back() |= 0x80;  // padding
    ExpectRefused(format, payload, 3);
  }
}

class CodedValues : public ::testing::TestWithParam<ValueFormat> {
 protected:
  static std::vector<uint8_t> Coded(const std::vector<float>& values) {
    return CodeValues(GetParam(), values.data(), values.size());
  }
  static absl::StatusCode Status(const std::vector<uint8_t>& payload, size_t n) {
    std::vector<float> out(n);
    return ReadCodedValues(GetParam(), payload, n, out.data()).code();
  }
};

TEST_P(CodedValues, AreThoseThatAreWrittenOtherwiseInFewerBytes) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const std::vector<float> values = Tails(3000, seed);
    const std::vector<uint8_t> coded = Coded(values);
    ASSERT_FALSE(coded.empty());
    EXPECT_LT(coded.size(), BytesOf(GetParam(), values.size()));
    std::vector<float> back(values.size());
    ASSERT_EQ(ReadCodedValues(GetParam(), coded, back.size(), back.data()), absl::OkStatus());
    EXPECT_EQ(back, ThereAndBack(GetParam(), values));
  }
}

// What common/codec/README.md says of them.
TEST(ValueFormat, CodedTakeFewerBitsTheHeavierTheTails) {
  const auto bits = [](ValueFormat format, bool heavy) {
    std::mt19937_64 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> values;
    while (values.size() < 40'000) {
      const float x = normal(random) * (heavy ? std::exp(normal(random)) : 1);
      if (std::fabs(x) > 2.5f) values.push_back(x);
    }
    return 8 * static_cast<double>(CodeValues(format, values.data(), values.size()).size()) / 40'000;
  };
  EXPECT_NEAR(bits(ValueFormat::kInt8, false), 5.7, 0.1);
  EXPECT_NEAR(bits(ValueFormat::kInt6, false), 3.7, 0.1);
  EXPECT_NEAR(bits(ValueFormat::kInt4, false), 2.4, 0.1);
  EXPECT_NEAR(bits(ValueFormat::kInt8, true), 4.6, 0.1);
  EXPECT_NEAR(bits(ValueFormat::kInt6, true), 2.9, 0.1);
  EXPECT_NEAR(bits(ValueFormat::kInt4, true), 1.6, 0.1);
}

TEST_P(CodedValues, AreNoneWhereTheySaveNothing) {
  EXPECT_TRUE(Coded({}).empty());
  EXPECT_TRUE(Coded({1, -2}).empty());
  EXPECT_TRUE(CodeValues(ValueFormat::kFp16, Tails(3000, 1).data(), 3000).empty());
  EXPECT_TRUE(CodeValues(ValueFormat::k2Bit, Tails(3000, 1).data(), 3000).empty());
}

TEST_P(CodedValues, ThatNobodyWritesAreRefused) {
  const std::vector<float> values = Tails(3000, 7);
  const std::vector<uint8_t> coded = Coded(values);
  EXPECT_EQ(Status(coded, values.size()), absl::StatusCode::kOk);
  EXPECT_EQ(Status(coded, 0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Status({coded.begin(), coded.begin() + 4}, values.size()), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Status({coded.begin(), coded.end() - 1}, values.size()), absl::StatusCode::kInvalidArgument);
  std::vector<float> out(values.size());
  for (ValueFormat format : {ValueFormat::kFp32, ValueFormat::kFp16, ValueFormat::kBf16, ValueFormat::k2Bit})
    EXPECT_FALSE(ReadCodedValues(format, coded, out.size(), out.data()).ok());
  std::vector<uint8_t> infinite = coded;
  infinite[2] = 0x80, infinite[3] = 0x7F;
  EXPECT_EQ(Status(infinite, values.size()), absl::StatusCode::kInvalidArgument);
  // One integer, the largest of the format, one more, and the least of two's complement and one less.
  const int32_t largest = GetParam() == ValueFormat::kInt8 ? 127 : GetParam() == ValueFormat::kInt6 ? 31 : 7;
  for (const int32_t integer : {largest, largest + 1, -largest - 1, -largest - 2}) {
    const CodedIntegers alone = EncodeIntegers({&integer, 1});
    std::vector<uint8_t> payload = {0, 0, 0x80, 0x3F, static_cast<uint8_t>(alone.bits)};  // scale 1
    payload.insert(payload.end(), alone.payload.begin(), alone.payload.end());
    EXPECT_EQ(Status(payload, 1) == absl::StatusCode::kOk, integer <= largest && integer >= -largest - 1) << integer;
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, CodedValues,
                         ::testing::Values(ValueFormat::kInt8, ValueFormat::kInt6, ValueFormat::kInt4));

TEST(ValueFormat, TwoBitsKeepSignsAndTwoMagnitudes) {
  EXPECT_EQ(ThereAndBack(ValueFormat::k2Bit, {-1, 1, 8, -10, 1, -1, 9}), (std::vector<float>{-1, 1, 9, -9, 1, -1, 9}));
  EXPECT_EQ(ThereAndBack(ValueFormat::k2Bit, {3, -3, 3}), (std::vector<float>{3, -3, 3}));
  EXPECT_EQ(ThereAndBack(ValueFormat::k2Bit, {0, -0.0f}), (std::vector<float>{0, 0}));
  EXPECT_EQ(ThereAndBack(ValueFormat::k2Bit, {-7}), (std::vector<float>{-7}));
}

TEST(ValueFormat, TwoBitsOfWhatTopKPicksLoseLessThanATwentiethOfItsEnergy) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    for (size_t n : {5, 100, 10000}) {
      const std::vector<float> values = Tails(n, seed);
      double energy = 0;
      for (float v : values) energy += static_cast<double>(v) * v;
      EXPECT_LT(SquaredError(ValueFormat::k2Bit, values), energy / 20) << n << ", seed " << seed;
    }
  }
}

// One turn further changes nothing that matters: each magnitude is the mean of what is nearer to it.
TEST(ValueFormat, TwoBitsAreNoWorseThanAnyOtherTwoMagnitudesByMuch) {
  const std::vector<float> values = Tails(2000, 3);
  double best = std::numeric_limits<double>::infinity();
  for (float low = 2; low < 3; low += 0.02f) {
    for (float high = low; high < 4; high += 0.02f) {
      double sum = 0;
      for (float v : values)
        sum += std::pow(std::min(std::fabs(std::fabs(v) - low), std::fabs(std::fabs(v) - high)), 2);
      best = std::min(best, sum);
    }
  }
  EXPECT_LT(SquaredError(ValueFormat::k2Bit, values), 1.1 * best);
}

TEST(ValueFormat, TwoBitsTakeTheLargestAndTheLeastNumbers) {
  const float largest = std::numeric_limits<float>::max(), least = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(ThereAndBack(ValueFormat::k2Bit, {largest, -largest, 1}), (std::vector<float>{largest, -largest, 1}));
  EXPECT_EQ(ThereAndBack(ValueFormat::k2Bit, {least, -least}), (std::vector<float>{least, -least}));
  EXPECT_EQ(ThereAndBack(ValueFormat::k2Bit, std::vector<float>(5000, largest)), std::vector<float>(5000, largest));
}

TEST(ValueFormat, TwoBitsThatNobodyWritesAreRefused) {
  const auto with = [](float low, float high, uint8_t codes) {
    std::vector<uint8_t> payload(9, codes);
    std::memcpy(payload.data(), &low, 4);
    std::memcpy(payload.data() + 4, &high, 4);
    return payload;
  };
  EXPECT_EQ(Read(ValueFormat::k2Bit, with(1, 2, 0b111001), 3), (std::vector<float>{-1, 2, -2}));
  ExpectRefused(ValueFormat::k2Bit, with(2, 1, 0), 3);
  ExpectRefused(ValueFormat::k2Bit, with(-1, 1, 0), 3);
  ExpectRefused(ValueFormat::k2Bit, with(-0.0f, 1, 0), 3);
  ExpectRefused(ValueFormat::k2Bit, with(1, std::numeric_limits<float>::infinity(), 0), 3);
  ExpectRefused(ValueFormat::k2Bit, with(1, std::nanf(""), 0), 3);
  ExpectRefused(ValueFormat::k2Bit, with(std::nanf(""), 1, 0), 3);
  ExpectRefused(ValueFormat::k2Bit, with(1, 2, 0b1000000), 3);
}

}  // namespace
}  // namespace gradwire

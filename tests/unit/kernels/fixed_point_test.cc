// Quantisation and ranges against an oracle in float64.
#include "kernels/math/fixed_point.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/backend.h"

namespace gradwire::kernels {
namespace {

TEST(RoundToEven, AgreesWithTheLibrary) {
  std::mt19937 random(1);
  for (int i = 0; i < 200'000; ++i) {
    const float x = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (!std::isfinite(x)) continue;
    ASSERT_EQ(RoundToEven(x), std::nearbyint(x)) << x;
  }
  for (float x : {0.5f, 1.5f, 2.5f, -0.5f, -1.5f, 8388607.5f, 8388608.0f, -8388609.0f}) {
    EXPECT_EQ(RoundToEven(x), std::nearbyint(x)) << x;
  }
}

TEST(LargestFloatWithin, NeverExceedsTheLimit) {
  for (int32_t limit : {0, 1, 31, 32767, 16777215, 16777216, 16777217, 33554433, 2147483647, 1073741823}) {
    const double f = LargestFloatWithin(limit);
    EXPECT_LE(f, limit);
    EXPECT_GE(f, limit * (1 - 0x1p-23));
  }
}

// What QuantizeOne promises, computed in float64.
void ExpectQuantized(float x, int exponent, int32_t limit) {
  float rest = 0;
  const float bound = LargestFloatWithin(limit);
  const int32_t q = QuantizeOne(x, PowerOfTwo(-exponent), PowerOfTwo(exponent), bound, &rest);
  ASSERT_EQ(static_cast<double>(x), std::ldexp(q, exponent) + static_cast<double>(rest)) << x << " at 2^" << exponent;
  ASSERT_LE(std::abs(static_cast<double>(q)), static_cast<double>(limit));
  if (std::abs(x) >= std::ldexp(1.0, exponent + 50)) {  // float64 could not hold the difference either
    ASSERT_EQ(q, 0);
    return;
  }
  const double wanted = std::clamp(std::nearbyint(std::ldexp(static_cast<double>(x), -exponent)),
                                   -static_cast<double>(bound), static_cast<double>(bound));
  const double difference = static_cast<double>(x) - std::ldexp(wanted, exponent);
  const bool exact = static_cast<double>(static_cast<float>(difference)) == difference;
  ASSERT_EQ(static_cast<double>(q), exact ? wanted : 0.0) << x << " at 2^" << exponent << ", limit " << limit;
}

TEST(QuantizeOne, IsExactOrSendsNothing) {
  std::mt19937_64 random(2);
  for (int32_t limit : {1, 2, 31, 127, 8191, 32767, 33554431, 2147483647}) {
    for (int i = 0; i < 60'000; ++i) {
      const int exponent = static_cast<int>(random() % 100) - 60;
      const float mantissa = std::bit_cast<float>(0x3F800000u | static_cast<uint32_t>(random() & 0x7FFFFF));
      const float sign = random() % 2 ? 1.0f : -1.0f;
      ExpectQuantized(sign * std::ldexp(mantissa, exponent + static_cast<int>(random() % 50) - 10), exponent, limit);
    }
  }
}

TEST(QuantizeOne, HandlesTheEdges) {
  const float denormal = std::numeric_limits<float>::denorm_min();
  const float huge = std::numeric_limits<float>::max();
  for (float x : {0.0f, -0.0f, denormal, -denormal, huge, -huge, 0.5f, 1.5f, -2.5f, 31.5f, 32.0f, 1e10f}) {
    for (int exponent : {kMinExponent, -10, 0, 10, kMaxExponent}) {
      for (int32_t limit : {1, 31, 2147483647}) ExpectQuantized(x, exponent, limit);
    }
  }
}

TEST(Quantize, DequantizeRestoresTheInput) {
  auto backend = *MakeBackend("cpu");
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal;
  for (int width : {1, 2, 4}) {
    const int32_t limit = width == 1 ? 63 : width == 2 ? 9999 : 1 << 29;
    for (size_t n : {0u, 1u, 15u, 16u, 17u, 4096u}) {
      std::vector<float> x(n);
      for (float& v : x) v = normal(random);
      std::vector<float> rest = x;
      std::vector<uint8_t> q(n * width);
      backend->Quantize(rest.data(), n, -5, limit, width, q.data(), nullptr);
      for (size_t i = 0; i < n; ++i) {
        float one;
        const int32_t expected = QuantizeOne(x[i], 32.0f, 0x1p-5f, LargestFloatWithin(limit), &one);
        int32_t got = 0;
        std::memcpy(&got, &q[i * width], width);
        got = static_cast<int32_t>(static_cast<uint32_t>(got) << (32 - 8 * width)) >> (32 - 8 * width);
        ASSERT_EQ(got, expected);
        ASSERT_EQ(rest[i], one);
      }
      backend->Dequantize(q.data(), width, n, -5, rest.data(), nullptr);
      EXPECT_EQ(rest, x);
    }
  }
}

TEST(RangeOf, IsTheSmallestPowerOfTwoThatHolds) {
  auto backend = *MakeBackend("cpu");
  const auto range = [&](std::vector<float> x) { return backend->RangeOf(x.data(), x.size(), nullptr); };
  EXPECT_EQ(range({}), kMinRange);
  EXPECT_EQ(range({0.0f, -0.0f}), kMinRange);
  EXPECT_EQ(range({1e-40f}), kMinRange);
  EXPECT_EQ(range({1.0f}), 0);
  EXPECT_EQ(range({0.1f, -1.0000001f, 0.2f}), 1);
  EXPECT_EQ(range({0.5f}), -1);
  EXPECT_EQ(range({0x1p-40f}), -40);
  EXPECT_EQ(range({0x1.8p-40f}), -39);
  EXPECT_EQ(range({-3e38f}), kMaxRange);
  EXPECT_EQ(range({8388608.0f}), 23);
}

}  // namespace
}  // namespace gradwire::kernels

// Choosing a backend, and dense merging on it.
#include "kernels/backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/cpu/simd/simd_backend.h"

namespace gradwire::kernels {
namespace {

using ::testing::HasSubstr;

TEST(MakeBackend, KnowsItsNames) {
  EXPECT_EQ((*MakeBackend("reference"))->name(), "reference");
  const std::vector<std::string> targets = SimdTargets();
  EXPECT_EQ((*MakeBackend("cpu"))->name(), targets.empty() ? "reference" : "cpu:" + targets.front());
  EXPECT_TRUE((*MakeBackend("auto"))->host_memory());
  const auto cuda = MakeBackend("cuda");
  if (!cuda.ok()) {  // no GPU here
    EXPECT_EQ(cuda.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(cuda.status().message()), HasSubstr("use 'cpu'"));
  }
  EXPECT_EQ(MakeBackend("tpu").status().code(), absl::StatusCode::kInvalidArgument);
}

class BackendTest : public ::testing::Test {
 protected:
  std::unique_ptr<Backend> backend_ = *MakeBackend("cpu");
  std::mt19937_64 random_{7};
};

TEST_F(BackendTest, AddIntegersWrapsAndInverts) {
  for (int width : {1, 2, 4}) {
    for (size_t n : {0u, 1u, 7u, 8u, 9u, 1000u}) {
      for (size_t misalign : {0u, 1u, 3u}) {
        std::vector<uint8_t> values(n * width + misalign);
        for (uint8_t& v : values) v = static_cast<uint8_t>(random_());
        std::vector<int32_t> acc(n), expected(n);
        for (size_t i = 0; i < n; ++i) {
          acc[i] = static_cast<int32_t>(random_());
          int32_t v = 0;
          std::memcpy(&v, values.data() + misalign + i * width, width);
          v = static_cast<int32_t>(static_cast<uint32_t>(v) << (32 - 8 * width)) >> (32 - 8 * width);
          expected[i] = static_cast<int32_t>(static_cast<uint32_t>(acc[i]) + static_cast<uint32_t>(v));
        }
        const std::vector<int32_t> before = acc;
        backend_->AddIntegers(acc.data(), values.data() + misalign, width, n, Sign::kAdd, nullptr);
        EXPECT_EQ(acc, expected);
        backend_->AddIntegers(acc.data(), values.data() + misalign, width, n, Sign::kSubtract, nullptr);
        EXPECT_EQ(acc, before);
      }
    }
  }
}

TEST_F(BackendTest, GridHoldsFloatsAndGivesTheirMean) {
  const std::vector<float> x = {0.0f, -0.0f, 1.0f, -0.75f, 262143.984375f, 0x1p-44f, 0x1p-45f, 0x1.8p-44f, 1e-30f};
  const auto bytes = reinterpret_cast<const uint8_t*>(x.data());
  ASSERT_EQ(backend_->FindOutOfGrid(bytes, 4, x.size(), kGridLimitBits, nullptr), -1);
  std::vector<int64_t> acc(x.size(), 0);
  backend_->AddFloats(acc.data(), bytes, 4, x.size(), Sign::kAdd, nullptr);
  EXPECT_EQ(acc[2], int64_t{1} << kGridBits);
  EXPECT_EQ(acc[5], 1);
  EXPECT_EQ(acc[6], 0) << "half a unit rounds to even";
  EXPECT_EQ(acc[7], 2) << "one and a half units round to even";
  std::vector<float> mean(x.size());
  backend_->GridToMean(acc.data(), acc.size(), 2, mean.data(), nullptr);
  EXPECT_EQ(mean[3], -0.375f);
  EXPECT_EQ(mean[4], 262143.984375f / 2);
  backend_->AddFloats(acc.data(), bytes, 4, x.size(), Sign::kSubtract, nullptr);
  EXPECT_EQ(acc, std::vector<int64_t>(x.size(), 0));
}

TEST_F(BackendTest, GridSumsRoundAsLlrintDoes) {
  std::vector<float> x;
  for (int exponent = -80; exponent < kGridRangeBits; ++exponent) {
    for (int i = 0; i < 500; ++i) {
      const float mantissa = 1.0f + static_cast<float>(random_() & 0x7FFFFFu) * 0x1p-23f;
      x.push_back(std::ldexp((random_() & 1) != 0 ? mantissa : -mantissa, exponent));
    }
  }
  std::vector<int64_t> expected;
  for (float v : x) expected.push_back(std::llrint(std::ldexp(static_cast<double>(v), kGridBits)));
  std::vector<int64_t> acc(x.size(), 0);
  backend_->AddFloats(acc.data(), reinterpret_cast<const uint8_t*>(x.data()), 4, x.size(), Sign::kAdd, nullptr);
  EXPECT_EQ(acc, expected);
}

// As many values as the limit was made for, each as large as it lets them be, stay inside a sum of 64 bits; the next
// larger float32 would be more than a share.
TEST_F(BackendTest, GridLimitsKeepSumsInside64Bits) {
  std::vector<uint32_t> numbers;
  for (uint32_t values = 1; values <= 20'000; ++values) numbers.push_back(values);
  for (int i = 0; i < 20'000; ++i) numbers.push_back(1 + static_cast<uint32_t>(random_() % (1u << 24)));
  for (const uint32_t values : numbers) {
    const uint32_t limit = GridLimitBits(values);
    const float largest = std::bit_cast<float>(limit - 1);
    ASSERT_LE(ToGrid(largest), uint64_t{INT64_MAX} / values) << values << " values";
    ASSERT_LE(limit, kGridLimitBits);
    if (limit == kGridLimitBits) continue;
    const double next = static_cast<double>(std::bit_cast<float>(limit + 1));
    ASSERT_GT(next * values, std::ldexp(1.0, 63 - kGridBits)) << values << " values";
  }
}

TEST_F(BackendTest, FindsTheFirstValueOutOfTheGrid) {
  for (float bad :
       {262144.0f, -1e20f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    for (size_t at : {0u, 1u, 4095u, 4096u, 9999u}) {
      std::vector<float> x(10'000, 1.0f);
      x[at] = bad;
      x.back() = bad;
      for (const uint32_t limit : {kGridLimitBits, GridLimitBits(1000)}) {
        EXPECT_EQ(backend_->FindOutOfGrid(reinterpret_cast<const uint8_t*>(x.data()), 4, x.size(), limit, nullptr),
                  static_cast<int64_t>(at));
      }
      EXPECT_EQ(backend_->FindNonFinite(x.data(), x.size(), nullptr),
                std::isfinite(bad) ? -1 : static_cast<int64_t>(at));
    }
  }
}

TEST_F(BackendTest, Bf16RoundsToNearestEvenAndKeepsTheRest) {
  std::vector<float> x;
  for (int i = 0; i < 20'000; ++i) {
    const float v = std::bit_cast<float>(static_cast<uint32_t>(random_()));
    if (std::isfinite(v)) x.push_back(v);
  }
  x.insert(x.end(), {0.0f, -0.0f, 1.00390625f, 1.01171875f, std::numeric_limits<float>::max(),
                     -std::numeric_limits<float>::max()});
  std::vector<float> rest = x;
  std::vector<uint8_t> out(2 * x.size());
  backend_->SplitBf16(rest.data(), rest.size(), kLargestBf16, out.data(), nullptr);
  for (size_t i = 0; i < x.size(); ++i) {
    uint16_t bits;
    std::memcpy(&bits, &out[2 * i], 2);
    const double sent = std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
    ASSERT_TRUE(std::isfinite(sent)) << x[i];
    ASSERT_EQ(static_cast<double>(x[i]), sent + static_cast<double>(rest[i])) << x[i];
    if (std::abs(x[i]) < 1e38f && std::abs(x[i]) > 1e-37f) {
      ASSERT_LE(std::abs(rest[i]), std::abs(x[i]) * 0x1.02p-8f) << x[i];
    }
  }
  std::vector<float> back = rest;
  backend_->AddBf16(out.data(), back.size(), back.data(), nullptr);
  EXPECT_EQ(back, x);
  uint16_t tie;
  std::memcpy(&tie, &out[2 * (x.size() - 4)], 2);
  EXPECT_EQ(tie, 0x3F80) << "1 + 1/256 lies between 1 and 1 + 1/128 and goes to the even one";
}

}  // namespace
}  // namespace gradwire::kernels

// Taking selected elements against a plain loop over IsSelected, and the spread of ties.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/backend.h"
#include "kernels/math/fixed_point.h"
#include "kernels/math/select.h"

namespace gradwire::kernels {
namespace {

TEST(TakeSelected, AgreesWithTheScalarRule) {
  auto backend = *MakeBackend("cpu");
  std::mt19937_64 random(5);
  std::normal_distribution<float> normal;
  for (size_t n : {0u, 1u, 63u, 64u, 65u, 127u, 1000u, 4096u}) {
    for (float threshold : {0.0f, 0.5f, 2.5f, 100.0f}) {
      for (uint64_t keep : {uint64_t{0}, uint64_t{1} << 31, uint64_t{1} << 32}) {
        std::vector<float> x(n);
        for (float& v : x) v = random() % 3 == 0 ? threshold : normal(random);
        const SelectArgs args = {KeyOf(threshold), keep, 12345, 77, -6, 100};
        std::vector<float> rest = x;
        std::vector<uint32_t> positions(n);
        std::vector<int32_t> integers(n);
        const size_t taken =
            backend->TakeSelected(rest.data(), n, args, 1000, positions.data(), integers.data(), nullptr);
        size_t expected = 0;
        for (size_t i = 0; i < n; ++i) {
          float left = x[i];
          int32_t q = 0;
          if (IsSelected(x[i], args.key, args.keep_below, args.first_element + i, args.phase)) {
            q = QuantizeOne(x[i], PowerOfTwo(6), PowerOfTwo(-6), 100, &left);
          }
          if (q == 0) left = x[i];
          ASSERT_EQ(rest[i], left);
          if (q == 0) continue;
          ASSERT_LT(expected, taken);
          ASSERT_EQ(positions[expected], 1000 + i);
          ASSERT_EQ(integers[expected], q);
          ++expected;
        }
        ASSERT_EQ(taken, expected);
      }
    }
  }
}

TEST(TieOrder, TakesTheWantedShareOfAnyStretch) {
  for (double share : {0.001, 0.01, 0.1, 0.5}) {
    const uint64_t keep = static_cast<uint64_t>(share * 0x1p32);
    for (uint64_t start : {uint64_t{0}, uint64_t{12'345}, uint64_t{1} << 33}) {
      for (uint64_t n : {1000u, 100'000u}) {
        uint64_t kept = 0;
        for (uint64_t i = 0; i < n; ++i) kept += TieOrder(start + i, TiePhase(3, 4, 5)) < keep;
        EXPECT_NEAR(static_cast<double>(kept), share * static_cast<double>(n), 4) << share << " of " << n;
      }
    }
  }
}

TEST(TiePhase, DependsOnEverything) {
  const uint32_t phase = TiePhase(1, 2, 3);
  EXPECT_NE(phase, TiePhase(2, 2, 3));
  EXPECT_NE(phase, TiePhase(1, 3, 3));
  EXPECT_NE(phase, TiePhase(1, 2, 4));
}

TEST(Histograms, CountNonZeroElements) {
  auto backend = *MakeBackend("cpu");
  std::vector<float> x = {0.0f, -0.0f, 1.0f, -1.0f, 1.0f, 2.0f, 1e-45f, 0x1.0002p0f, 3e38f};
  std::vector<uint64_t> upper(1 << kUpperBits, 99), lower(1 << kLowerBits, 99);
  backend->UpperHistogram(x.data(), x.size(), upper.data(), nullptr);
  EXPECT_EQ(std::accumulate(upper.begin(), upper.end(), uint64_t{0}), 7u);
  const uint32_t one = KeyOf(1.0f) >> kLowerBits;
  EXPECT_EQ(upper[one], 4u);
  EXPECT_EQ(upper[0], 1u) << "the denormal counts, the zeros do not";
  backend->LowerHistogram(x.data(), x.size(), one, lower.data(), nullptr);
  EXPECT_EQ(lower[0], 3u);
  EXPECT_EQ(std::accumulate(lower.begin(), lower.end(), uint64_t{0}), 4u);
  backend->LowerHistogram(x.data(), x.size(), 0, lower.data(), nullptr);
  EXPECT_EQ(lower[0], 1u);
}

TEST(AddPreconditioned, DividesByTheRootOfTheCorrectedSecondMoment) {
  auto backend = *MakeBackend("cpu");
  std::vector<float> g = {0.0f, 0.001f, -4.0f, 1e-20f, 1e-6f};
  std::vector<float> v(g.size(), 0.0f), x(g.size(), 0.0f);
  std::vector<double> ov(g.size(), 0.0), ox(g.size(), 0.0);
  for (uint64_t t = 1; t <= 20; ++t) {
    backend->AddPreconditioned(x.data(), g.data(), v.data(), g.size(), MakePrecondition(0.99f, 1e-8f, t), nullptr);
    for (size_t i = 0; i < g.size(); ++i) {
      ov[i] = 0.99 * ov[i] + 0.01 * static_cast<double>(g[i]) * static_cast<double>(g[i]);
      ox[i] += static_cast<double>(g[i]) / (std::sqrt(ov[i] / (1 - std::pow(0.99, static_cast<double>(t)))) + 1e-8);
    }
    if (t == 1) {
      EXPECT_NEAR(x[1], 1.0f, 1e-4);
    }
  }
  for (size_t i = 0; i < g.size(); ++i) EXPECT_NEAR(x[i], ox[i], 1e-4 * std::abs(ox[i]) + 1e-10) << g[i];
}

}  // namespace
}  // namespace gradwire::kernels

// LAMB, LANS and Lion against their definitions in float64; sums of squares in their order.
#include "kernels/cpu/layerwise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace gradwire::kernels {
namespace {

std::vector<float> RandomValues(uint64_t seed, size_t n, float scale) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> out(n);
  for (float& v : out) v = normal(random);
  return out;
}

TEST(SumOfSquares, IsThatOfEightSumsInTheirOrder) {
  for (const size_t n : {0u, 1u, 7u, 8u, 9u, 64u, 4095u, 4096u}) {
    const std::vector<float> x = RandomValues(n, n, 3);
    double sums[8] = {};
    double plain = 0;
    for (size_t i = 0; i < n; ++i) {
      sums[i % 8] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
      plain += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    }
    const double expected = ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
    EXPECT_EQ(SumOfSquares(x.data(), n), expected) << n;
    EXPECT_NEAR(SumOfSquares(x.data(), n), plain, 1e-12 * plain) << n;
  }
}

TEST(SumOfSquares, HoldsTheLargestFloatsAndTheSmallest) {
  const std::vector<float> large(100, std::numeric_limits<float>::max());
  EXPECT_TRUE(std::isfinite(SumOfSquares(large.data(), large.size())));
  const std::vector<float> small(16, std::numeric_limits<float>::denorm_min());
  EXPECT_GT(SumOfSquares(small.data(), small.size()), 0);
}

TEST(TrustRatio, IsOneWhereANormIsZeroOrNotANumber) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  EXPECT_EQ(TrustRatio(16, 4), 2);
  for (const auto& [p, u] : std::vector<std::pair<double, double>>{
           {0, 1}, {1, 0}, {0, 0}, {nan, 1}, {1, nan}, {inf, 1}, {1, inf}, {inf, inf}}) {
    EXPECT_EQ(TrustRatio(p, u), 1) << p << " " << u;
  }
}

TEST(Lion, FollowsItsDefinition) {
  constexpr size_t kElements = 1001;
  std::vector<float> p = RandomValues(1, kElements, 1), m(kElements, 0);
  p[5] = 0.25f;
  std::vector<double> op(p.begin(), p.end()), om(kElements, 0);
  const double lr = 0.0078125, wd = 0.125, b1 = 0.875, b2 = 0.984375;  // exact in float32
  for (uint64_t t = 1; t <= 50; ++t) {
    std::vector<float> g = RandomValues(100 + t, kElements, 0.01f);
    g[5] = 0;  // never a gradient: only decay
    const LionCoefficients c =
        MakeLion(static_cast<float>(lr), static_cast<float>(wd), static_cast<float>(b1), static_cast<float>(b2));
    Lion(p.data(), g.data(), m.data(), kElements, c);
    for (size_t i = 0; i < kElements; ++i) {
      const double direction = b1 * om[i] + (1 - b1) * g[i];
      op[i] -= lr * ((direction > 0) - (direction < 0) + wd * op[i]);
      om[i] = b2 * om[i] + (1 - b2) * g[i];
    }
  }
  for (size_t i = 0; i < kElements; ++i) ASSERT_NEAR(p[i], op[i], 1e-5);
  EXPECT_NEAR(p[5], 0.25 * std::pow(1 - lr * wd, 50), 1e-6);
}

TEST(Layerwise, TakesTheSameBitsHoweverATensorIsCut) {
  constexpr size_t kElements = 513;
  LayerCoefficients c = MakeLayer(0.01f, 0.9f, 0.999f, 1e-6f, 3);
  c.gradient_scale = 7;
  c.direction_rate = 0.1f;
  c.gradient_rate = 0.01f;
  for (const auto step : {&Lamb, &Lans}) {
    const std::vector<float> g = RandomValues(2, kElements, 1);
    std::vector<float> p = RandomValues(3, kElements, 1), m = RandomValues(4, kElements, 1), v(kElements, 0.5f);
    std::vector<float> cut_p = p, cut_m = m, cut_v = v;
    step(p.data(), g.data(), m.data(), v.data(), kElements, c);
    for (size_t begin = 0; begin < kElements; begin += 100) {
      const size_t n = std::min<size_t>(100, kElements - begin);
      step(&cut_p[begin], &g[begin], &cut_m[begin], &cut_v[begin], n, c);
    }
    EXPECT_EQ(p, cut_p);
    EXPECT_EQ(m, cut_m);
    EXPECT_EQ(v, cut_v);
  }
}

}  // namespace
}  // namespace gradwire::kernels

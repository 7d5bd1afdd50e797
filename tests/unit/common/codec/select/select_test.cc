// The threshold hits the wanted density without a sort, whatever the distribution.
#include "common/codec/select/select.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "kernels/math/select.h"

namespace gradwire {
namespace {

class SelectTest : public ::testing::Test {
 protected:
  // Selected elements of x; checks that none is 0 and that none that was left out is larger than one that was taken.
  size_t Count(const std::vector<float>& x, const Selection& s) {
    const uint32_t phase = kernels::TiePhase(1, 2, 3);
    size_t n = 0;
    uint32_t smallest_taken = UINT32_MAX, largest_left = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      const uint32_t key = kernels::KeyOf(x[i]);
      if (kernels::IsSelected(x[i], s.key, s.keep_below, i, phase)) {
        ++n;
        EXPECT_NE(x[i], 0.0f);
        smallest_taken = std::min(smallest_taken, key);
      } else {
        largest_left = std::max(largest_left, key);
      }
    }
    EXPECT_GE(smallest_taken, largest_left);
    return n;
  }

  std::unique_ptr<kernels::Backend> backend_ = *kernels::MakeBackend("cpu");
};

TEST_F(SelectTest, HitsTheWantedDensityWithinFivePercent) {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  std::cauchy_distribution<float> cauchy;
  const std::vector<std::pair<const char*, std::function<float(size_t, size_t)>>> inputs = {
      {"gaussian", [&](size_t, size_t) { return normal(random); }},
      {"tiny gaussian", [&](size_t, size_t) { return 1e-30f * normal(random); }},
      {"heavy-tailed", [&](size_t, size_t) { return cauchy(random); }},
      {"all equal", [](size_t, size_t) { return -1.0f; }},
      {"equal magnitudes", [](size_t i, size_t) { return i % 3 == 0 ? -1.0f : 1.0f; }},
      {"clustered",
       [&](size_t i, size_t n) { return i > n / 2 && i < n - n / 4 ? 100 * normal(random) : normal(random) * 1e-3f; }},
      {"denormal",
       [&](size_t, size_t) {
         return std::numeric_limits<float>::denorm_min() * static_cast<float>(random() % 8'000'000);
       }},
      {"smallest denormals", [](size_t, size_t) { return std::numeric_limits<float>::denorm_min(); }},
      {"quantised",
       [&](size_t, size_t) { return static_cast<float>(static_cast<int>(std::lround(4 * normal(random)))); }},
      {"negative", [&](size_t, size_t) { return -std::abs(normal(random)); }},
  };
  for (const auto& [name, make] : inputs) {
    for (size_t n : {10'000u, 131'071u, 1'000'000u}) {
      std::vector<float> x(n);
      for (size_t i = 0; i < n; ++i) x[i] = make(i, n);
      const size_t nonzero = static_cast<size_t>(std::count_if(x.begin(), x.end(), [](float v) { return v != 0; }));
      for (double density : {0.001, 0.01, 0.1, 0.5}) {
        const double wanted = std::min(density * static_cast<double>(n), static_cast<double>(nonzero));
        if (wanted < 100) continue;
        // Ties that lie anywhere are taken like coin flips: within 5 % once there are enough of them.
        if (std::string(name) == "quantised" && wanted < 2000) continue;
        const Selection s = SelectThreshold(x, density, kernels::Accuracy::kExact, *backend_);
        EXPECT_NEAR(static_cast<double>(Count(x, s)), wanted, 0.05 * wanted) << name << ", " << n << ", " << density;
      }
    }
  }
}

TEST_F(SelectTest, SelectsNothingWhereThereIsNothing) {
  std::vector<float> zeros(1000, 0.0f);
  zeros[5] = -0.0f;
  EXPECT_EQ(Count(zeros, SelectThreshold(zeros, 1.0, kernels::Accuracy::kExact, *backend_)), 0u);
  EXPECT_EQ(Count(zeros, SelectThreshold(zeros, 0.01, kernels::Accuracy::kExact, *backend_)), 0u);
  const std::vector<float> ones(1000, 1.0f);
  EXPECT_EQ(Count(ones, SelectThreshold(ones, 0.0, kernels::Accuracy::kExact, *backend_)), 0u);
  SelectThreshold({}, 0.5, kernels::Accuracy::kExact, *backend_);
}

TEST_F(SelectTest, SelectsAllThatIsNotZeroWhenThereIsLittle) {
  std::vector<float> x(1000, 0.0f);
  x[3] = 1e-45f;
  x[500] = -3e38f;
  EXPECT_EQ(Count(x, SelectThreshold(x, 0.01, kernels::Accuracy::kExact, *backend_)), 2u);
  EXPECT_EQ(Count(x, SelectThreshold(x, 1.0, kernels::Accuracy::kExact, *backend_)), 2u);
  const std::vector<float> ones(7, 1.0f);
  EXPECT_EQ(Count(ones, SelectThreshold(ones, 1.0, kernels::Accuracy::kExact, *backend_)), 7u);
}

TEST_F(SelectTest, IsDeterministic) {
  std::mt19937_64 random(2);
  std::normal_distribution<float> normal;
  std::vector<float> x(50'000);
  for (float& v : x) v = normal(random);
  const Selection a = SelectThreshold(x, 0.01, kernels::Accuracy::kExact, *backend_);
  const Selection b = SelectThreshold(x, 0.01, kernels::Accuracy::kExact, *backend_);
  EXPECT_EQ(a.key, b.key);
  EXPECT_EQ(a.keep_below, b.keep_below);
}

TEST_F(SelectTest, FindsNonFiniteElements) {
  std::vector<float> x(10'000, 1.0f);
  EXPECT_EQ(FindNonFinite(x, *backend_), -1);
  x[9'999] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(FindNonFinite(x, *backend_), 9'999);
  x[0] = -std::numeric_limits<float>::infinity();
  EXPECT_EQ(FindNonFinite(x, *backend_), 0);
  EXPECT_EQ(FindNonFinite({}, *backend_), -1);
}

TEST_F(SelectTest, AddsGradientsToWhatIsPending) {
  const std::vector<float> g = {1, 2, 3};
  std::vector<float> pending = {0.5f, -2, 0};
  AddToPending(g, pending, *backend_);
  EXPECT_EQ(pending, (std::vector<float>{1.5f, 0, 3}));
  std::vector<float> v(3, 0.0f), step(3, 0.0f);
  AddStepToPending(g, v, step, 0.99f, 0.0f, 1, *backend_);
  for (float s : step) EXPECT_NEAR(s, 1.0f, 1e-5) << "the first step has magnitude 1";
}

}  // namespace
}  // namespace gradwire

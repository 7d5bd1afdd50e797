// The estimated threshold: which elements it looks at, that it is exactly theirs, and the density it gives on data that
// a sample could be misled by.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/math/select.h"

namespace gradwire::kernels {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(LineSample, IsEverythingWhereLittleIsWantedOrTheExactThreshold) {
  constexpr double kLeast = kLeastStride * kLeastSampled;
  for (double wanted : {0.0, -1.0, 1000.0, kLeast - 1, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_EQ(SampleOf(10'000'001, wanted, Accuracy::kEstimate).stride, 1u) << wanted;
  }
  EXPECT_EQ(SampleOf(10'000'001, kLeast, Accuracy::kEstimate).stride, kLeastStride);
  EXPECT_EQ(SampleOf(10'000'001, kInfinity, Accuracy::kEstimate).stride, kMostStride);
  EXPECT_EQ(SampleOf(1000, kInfinity, Accuracy::kEstimate).stride, 1u);
  const LineSample exact = SampleOf(10'000'001, 5e6, Accuracy::kExact);
  EXPECT_EQ(exact.stride, 1u);
  EXPECT_EQ(exact.size, 10'000'001u);
  EXPECT_EQ(exact.wanted, 5e6);
  for (uint64_t i : {uint64_t{0}, uint64_t{17}, uint64_t{10'000'000}}) EXPECT_EQ(exact.At(i), i);
}

TEST(LineSample, TakesOneLineOfEachStretchAnywhereInIt) {
  for (uint64_t n : {8'388'611u, 16'777'216u}) {
    for (double density : {0.04, 0.1, 0.9, 1.0}) {
      const double wanted = density * static_cast<double>(n);
      const LineSample sample = SampleOf(n, wanted, Accuracy::kEstimate);
      const uint64_t stretch = sample.stride * kSampleLine;
      ASSERT_GT(sample.stride, 1u);
      ASSERT_EQ(sample.size, n / stretch * kSampleLine);
      EXPECT_GE(sample.wanted, 0.999 * static_cast<double>(kLeastSampled));
      EXPECT_NEAR(sample.wanted / static_cast<double>(sample.size), density, 1e-9);
      std::vector<uint64_t> taken(sample.stride);
      for (uint64_t i = 0; i < sample.size; i += kSampleLine) {
        const uint64_t begin = sample.At(i);
        ASSERT_EQ(begin % kSampleLine, 0u);
        ASSERT_EQ(begin / stretch, i / kSampleLine);
        ASSERT_EQ(sample.At(i + kSampleLine - 1), begin + kSampleLine - 1) << "a line is taken as a whole";
        ++taken[begin % stretch / kSampleLine];
      }
      const uint64_t lines = sample.size / kSampleLine;
      const double share = static_cast<double>(lines) / static_cast<double>(sample.stride);
      for (uint64_t count : taken) EXPECT_NEAR(static_cast<double>(count), share, 5 * std::sqrt(share));
    }
  }
}

class Estimate : public ::testing::TestWithParam<std::string> {
 protected:
  Threshold Find(const std::vector<float>& x, double wanted) {
    return backend_->FindThreshold(x.data(), x.size(), wanted, Accuracy::kEstimate, nullptr);
  }
  // Of the elements that the threshold selects.
  static double Selected(const std::vector<float>& x, const Threshold& t) {
    uint64_t n = 0;
    for (size_t i = 0; i < x.size(); ++i) n += IsSelected(x[i], t.key, t.keep_below, i, TiePhase(1, 2, 3)) ? 1 : 0;
    return static_cast<double>(n);
  }
  std::vector<float> Normal(size_t n) {
    std::normal_distribution<float> normal;
    std::vector<float> x(n);
    for (float& v : x) v = normal(random_);
    return x;
  }

  const std::unique_ptr<Backend> backend_ = *MakeBackend(GetParam());
  std::mt19937_64 random_{20261122};
};
INSTANTIATE_TEST_SUITE_P(Kernels, Estimate, ::testing::Values("reference", "cpu"));

TEST_P(Estimate, IsTheThresholdOfItsElements) {
  const std::vector<float> x = Normal(3'000'019);
  for (double wanted : {300'000.0, 400'000.3, 2'900'000.0}) {
    const LineSample sample = SampleOf(x.size(), wanted, Accuracy::kEstimate);
    ASSERT_GT(sample.stride, 1u);
    std::vector<uint32_t> keys;
    for (uint64_t i = 0; i < sample.size; ++i) keys.push_back(KeyOf(x[sample.At(i)]));
    std::sort(keys.begin(), keys.end(), std::greater<>());
    const size_t last = static_cast<size_t>(std::ceil(sample.wanted)) - 1;
    EXPECT_EQ(Find(x, wanted).key, keys[last]) << wanted;
  }
}

TEST_P(Estimate, TakesEverythingWhereNoSampleMeetsIt) {
  const size_t n = 5'000'011;
  const double wanted = 0.1 * static_cast<double>(n);
  std::vector<float> x(n, 0.0f);
  EXPECT_EQ(Selected(x, Find(x, wanted)), 0);
  const LineSample sample = SampleOf(n, wanted, Accuracy::kEstimate);
  const uint64_t hidden = sample.At(0) == 0 ? kSampleLine : 0;  // in the first stretch, beside what is looked at
  x[hidden] = 1e-3f;
  x[n - 1] = -1e-30f;  // behind the last stretch
  EXPECT_EQ(Selected(x, Find(x, wanted)), 2);
  x[sample.At(100)] = 1.0f;
  EXPECT_EQ(Selected(x, Find(x, wanted)), 3);
  EXPECT_EQ(Selected(x, Find(x, 0)), 0);
}

// What a density is to be hit on: large elements as hot(i) says, of `share` of all, the others a thousandth of them.
struct Data {
  std::string name;
  double share;
  std::function<bool(size_t i, std::mt19937_64&)> hot;
};

std::vector<Data> AllData() {
  std::vector<Data> all = {{"uniform", 1, [](size_t, std::mt19937_64&) { return true; }}};
  // Runs that begin anywhere or at multiples of their length, one in twelve.
  for (size_t length : {16u, 40u, 256u, 4096u}) {
    for (bool aligned : {true, false}) {
      all.push_back({(aligned ? "aligned runs of " : "runs of ") + std::to_string(length), 1.0 / 12,
                     [=, left = size_t{0}, until = size_t{0}](size_t i, std::mt19937_64& random) mutable {
                       if (i == 0) left = until = 0;
                       if (left == 0 && i >= until) {
                         const bool begins = aligned ? random() % 12 == 0 : random() % (11 * length) == 0;
                         if (begins) left = length;
                         if (aligned) until = i + length;
                       }
                       return left > 0 && left-- > 0;
                     }});
    }
  }
  // One line of each period. A rule that looks at the same place of every stretch sees all of them or none.
  for (size_t lines : {11u, 12u, 16u, 22u, 33u}) {
    for (size_t place : {size_t{0}, lines / 2, lines - 1}) {
      all.push_back({"line " + std::to_string(place) + " of " + std::to_string(lines), 1.0 / static_cast<double>(lines),
                     [=](size_t i, std::mt19937_64&) { return i / kSampleLine % lines == place; }});
    }
  }
  all.push_back({"every 16th element", 1.0 / 16, [](size_t i, std::mt19937_64&) { return i % 16 == 3; }});
  return all;
}

// Half of what is large, all of it, and a part of the rest; where it is large enough for a sample.
TEST_P(Estimate, HitsTheWantedDensityWithinFivePercent) {
  const size_t n = 121 * 65'536 + 3;  // the stretch of half of one in 11 is 11 lines
  const std::vector<float> normal = Normal(n);
  std::vector<float> x(n);
  for (const Data& data : AllData()) {
    Data copy = data;
    for (size_t i = 0; i < n; ++i) x[i] = copy.hot(i, random_) ? normal[i] : 1e-3f * normal[i];
    for (double density : {0.5 * data.share, 0.95 * data.share, std::min(1.0, 3 * data.share), 0.1}) {
      const double wanted = density * static_cast<double>(n);
      if (SampleOf(n, wanted, Accuracy::kEstimate).stride == 1) continue;
      EXPECT_NEAR(Selected(x, Find(x, wanted)) / wanted, 1, 0.05) << data.name << ", density " << density;
    }
  }
}

TEST_P(Estimate, HitsTheWantedDensityWhereMuchIsEqualOrSorted) {
  const size_t n = 8'388'611;
  std::vector<float> x = Normal(n);
  const auto expect = [&](const char* what, double present) {
    for (double density : {0.04, 0.1, 0.3}) {
      const double wanted = density * static_cast<double>(n);
      EXPECT_NEAR(Selected(x, Find(x, wanted)), std::min(wanted, present), 0.05 * wanted) << what << ", " << density;
    }
  };
  const double all = static_cast<double>(n);
  std::sort(x.begin(), x.end());
  expect("sorted", all);
  std::sort(x.begin(), x.end(), [](float a, float b) { return std::abs(a) > std::abs(b); });
  expect("sorted by magnitude", all);
  for (size_t i = 0; i < n; i += 2) x[i] = 0;
  expect("half zeros", all / 2);
  for (size_t i = 0; i < n; ++i) x[i] = i / 64 % 12 == 5 ? x[i] : 0;
  expect("mostly zeros, in blocks", all / 24);
  for (size_t i = 0; i < n; ++i) x[i] = random_() % 2 == 0 ? 1.0f : -1.0f;
  expect("ties", all);
  for (size_t i = 0; i < n; ++i) x[i] = random_() % 20 == 0 ? 2.0f : 1.0f;
  expect("two magnitudes", all);
}

}  // namespace
}  // namespace gradwire::kernels

// The search for a threshold by brackets, with the pass over the elements written out.
#include "kernels/cpu/simd/bracket.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/reference/reference_backend.h"
#include "kernels/math/fixed_point.h"

namespace gradwire::kernels {
namespace {

// The bracket filled by all elements; false where they do not fit.
bool Pass(const std::vector<float>& x, Bracket* bracket) {
  bracket->above = 0;
  bracket->inside = 0;
  for (float value : x) {
    const uint32_t magnitude = FloatBits(value) & 0x7FFFFFFFu;
    bracket->above += magnitude >= bracket->high ? 1 : 0;
    if (magnitude < bracket->low || magnitude >= bracket->high) continue;
    if (bracket->inside == bracket->capacity) return false;
    bracket->collected[bracket->inside++] = magnitude;
  }
  return true;
}

// Residuals that grow evenly wait close below the threshold: all of these lie within one bin of the first look.
TEST(BracketSearch, ManyMagnitudesThatLieCloseTogetherFitItsRoom) {
  std::mt19937 random(3);
  std::vector<float> x(1 << 20);
  for (float& value : x) {
    value = std::uniform_real_distribution<float>(0.985f, 0.992f)(random);
    if (random() % 2 == 0) value = -value;
    if (random() % 1000 == 0) value *= 100;
  }
  const double wanted = 0.01 * static_cast<double>(x.size());
  BracketSearch search(x.data(), SampleOf(x.size(), wanted, Accuracy::kExact));
  Bracket* const bracket = search.Next();
  ASSERT_NE(bracket, nullptr);
  ASSERT_TRUE(Pass(x, bracket));
  Threshold found{};
  ASSERT_TRUE(search.Finish(&found));
  const Threshold want = MakeReferenceBackend()->FindThreshold(x.data(), x.size(), wanted, Accuracy::kExact, nullptr);
  EXPECT_EQ(found.key, want.key);
  EXPECT_EQ(found.keep_below, want.keep_below);
}

// A narrow look sees nothing beside its bracket: the next guess looks at all magnitudes again.
TEST(BracketSearch, ASecondGuessBeginsAnew) {
  std::mt19937 random(4);
  std::vector<float> x(1 << 20);
  for (float& value : x) value = std::uniform_real_distribution<float>(0.985f, 0.992f)(random);
  const double wanted = 0.01 * static_cast<double>(x.size());
  BracketSearch search(x.data(), SampleOf(x.size(), wanted, Accuracy::kExact));
  Bracket* const bracket = search.Next();
  ASSERT_NE(bracket, nullptr);
  const uint32_t low = bracket->low;
  bracket->above = static_cast<uint64_t>(2 * wanted);  // as if so many lay above
  Threshold found{};
  ASSERT_FALSE(search.Finish(&found));
  Bracket* const next = search.Next();
  ASSERT_NE(next, nullptr);
  EXPECT_GT(next->low, low) << "fewer lie above a higher threshold";
  EXPECT_TRUE(Pass(x, next));
}

TEST(BracketSearch, ManyTiesAreNothingForIt) {
  const std::vector<float> x(1 << 20, 0.5f);
  BracketSearch search(x.data(), SampleOf(x.size(), 1000, Accuracy::kExact));
  Bracket* const bracket = search.Next();
  EXPECT_TRUE(bracket == nullptr || !Pass(x, bracket));
}

}  // namespace
}  // namespace gradwire::kernels

// What PowerSGD is made of: which tensors are matrices, where factors lie, and arithmetic in a fixed order.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "common/codec/powersgd/arithmetic.h"
#include "common/codec/powersgd/matrices.h"
#include "common/job/matrix_shape.h"

namespace gradwire::powersgd {
namespace {

std::vector<float> Normal(size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& x : values) x = normal(random);
  return values;
}

double ProductOf(const float* a, const float* b, size_t n) {
  double sum = 0;
  for (size_t i = 0; i < n; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

TEST(MatrixShape, IsTheFirstDimensionByAllOthers) {
  const auto m = MatrixShapeOf({64, 3, 3, 3}, 4);
  ASSERT_TRUE(m.has_value());
  EXPECT_EQ(m->rows, 64u);
  EXPECT_EQ(m->cols, 27u);
  EXPECT_EQ(m->rank, 4u);
  EXPECT_FALSE(MatrixShapeOf({4096}, 1).has_value());
  EXPECT_FALSE(MatrixShapeOf({}, 1).has_value());
  EXPECT_FALSE(MatrixShapeOf({0, 3}, 1).has_value());
  EXPECT_FALSE(MatrixShapeOf({1, 5000}, 1).has_value()) << "factors of 5001 values";
  EXPECT_FALSE(MatrixShapeOf({8, 8}, 4).has_value()) << "factors of as many values";
  EXPECT_TRUE(MatrixShapeOf({8, 8}, 3).has_value());
}

TEST(Factors, MoveToWhereTheirTensorLies) {
  const std::vector<Matrix> from = {{7, 0, 2, 3, 1}, {5, 6, 4, 1, 1}};
  const std::vector<Matrix> to = {{9, 0, 1, 1, 1}, {5, 1, 4, 1, 1}};
  const std::vector<float> values = {1, 2, 3, 4, 5, 6};
  std::vector<float> target(SizeOf(to, Factor::kP), -1.0f);
  CopyFactors(from, values, to, Factor::kP, target);
  EXPECT_EQ(target, (std::vector<float>{-1, 3, 4, 5, 6}));
}

TEST(Arithmetic, IsThatOfFloat64ButForRounding) {
  for (size_t n : {0, 1, 15, 16, 17, 1000}) {
    const std::vector<float> a = Normal(n, 1), b = Normal(n, 2);
    EXPECT_NEAR(Dot(a.data(), b.data(), n), ProductOf(a.data(), b.data(), n), 1e-4) << n;
    std::vector<float> sum = a;
    AddScaled(b.data(), -0.5f, n, sum.data());
    for (size_t i = 0; i < n; ++i) EXPECT_EQ(sum[i], a[i] + -0.5f * b[i]);
  }
  const std::vector<float> columns = {1, 2, 3, 10, 20, 30};
  const float scales[] = {2, 0.5f};
  std::vector<float> out(2);
  Combine(scales, 2, columns.data() + 1, 3, 2, out.data());
  EXPECT_EQ(out, (std::vector<float>{2 * 2 + 10, 2 * 3 + 15}));
}

TEST(NormalizeColumns, GivesNormOneAndDrawsColumnsOfZeros) {
  constexpr size_t kRows = 100;
  std::vector<float> columns = Normal(2 * kRows, 3);
  std::fill(columns.begin() + kRows, columns.end(), 0.0f);
  std::vector<float> other = columns;
  const std::vector<float> before = columns;
  NormalizeColumns(columns.data(), kRows, 2, 42);
  NormalizeColumns(other.data(), kRows, 2, 43);
  for (size_t k = 0; k < 2; ++k) {
    EXPECT_NEAR(ProductOf(columns.data() + k * kRows, columns.data() + k * kRows, kRows), 1, 1e-6);
  }
  EXPECT_GT(columns[0] / before[0], 0);
  EXPECT_NEAR(columns[0] / before[0], columns[1] / before[1], 1e-6);
  EXPECT_TRUE(std::equal(columns.begin(), columns.begin() + kRows, other.begin()));
  EXPECT_FALSE(std::equal(columns.begin() + kRows, columns.end(), other.begin() + kRows)) << "another salt";
}

TEST(Orthonormalize, SpansWhatTheColumnsSpan) {
  constexpr size_t kRows = 333;
  constexpr uint32_t kRank = 5;
  const std::vector<float> before = Normal(kRank * kRows, 4);
  std::vector<float> columns = before;
  Orthonormalize(columns.data(), kRows, kRank);
  for (uint32_t a = 0; a < kRank; ++a) {
    for (uint32_t b = 0; b < kRank; ++b) {
      EXPECT_NEAR(ProductOf(&columns[a * kRows], &columns[b * kRows], kRows), a == b ? 1 : 0, 1e-6) << a << " " << b;
    }
    // A column is what its projections onto the first ones add up to.
    std::vector<double> rest(before.begin() + a * kRows, before.begin() + (a + 1) * kRows);
    for (uint32_t b = 0; b <= a; ++b) {
      const double along = ProductOf(&before[a * kRows], &columns[b * kRows], kRows);
      for (size_t i = 0; i < kRows; ++i) rest[i] -= along * static_cast<double>(columns[b * kRows + i]);
    }
    for (const double x : rest) EXPECT_NEAR(x, 0, 1e-5);
  }
}

TEST(Orthonormalize, MakesDependentColumnsZero) {
  constexpr size_t kRows = 50;
  std::vector<float> columns = Normal(4 * kRows, 5);
  for (size_t i = 0; i < kRows; ++i) {
    columns[kRows + i] = 3 * columns[i];
    columns[2 * kRows + i] = 0;
  }
  Orthonormalize(columns.data(), kRows, 4);
  for (size_t i = kRows; i < 3 * kRows; ++i) EXPECT_EQ(columns[i], 0.0f);
  EXPECT_NEAR(ProductOf(&columns[3 * kRows], &columns[3 * kRows], kRows), 1, 1e-6);
  EXPECT_NEAR(ProductOf(&columns[0], &columns[3 * kRows], kRows), 0, 1e-6);
}

}  // namespace
}  // namespace gradwire::powersgd

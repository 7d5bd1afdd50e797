// The sketch: distinct cells, exact sums, honest failure.
#include "kernels/math/sketch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "kernels/backend.h"

namespace gradwire::kernels {
namespace {

TEST(CellsOf, AreDistinctAndInRange) {
  for (uint32_t third : {1u, 2u, 100u, 3555u, 1u << 20}) {
    for (uint32_t groups : {1u, 7u, 1000u}) {
      for (uint32_t p = 0; p < 2000; ++p) {
        const SketchCells at = CellsOf(p * 2654435761u, 99, groups, third);
        ASSERT_LT(at.group, groups);
        for (uint32_t j = 0; j < 3; ++j) {
          ASSERT_GE(at.cell[j], j * third);
          ASSERT_LT(at.cell[j], (j + 1) * third);
        }
      }
    }
  }
}

TEST(CellsOf, SpreadsClusteredPositionsEvenly) {
  const uint32_t groups = 16;
  std::vector<int> load(groups, 0);
  for (uint32_t p = 0; p < 160'000; ++p) ++load[CellsOf(p, SketchSalt(1, 2, 3, 4), groups, 1000).group];
  for (int n : load) EXPECT_NEAR(n, 10'000, 500);  // five standard deviations
}

TEST(SketchSalt, DependsOnEverything) {
  const std::set<uint64_t> salts = {SketchSalt(1, 2, 3, 4), SketchSalt(2, 2, 3, 4), SketchSalt(1, 3, 3, 4),
                                    SketchSalt(1, 2, 4, 4), SketchSalt(1, 2, 3, 5), SketchSalt(1, 2, 4, 3)};
  EXPECT_EQ(salts.size(), 6u);
}

// The worked example of proto/WIRE.md, which was computed apart from this code.
TEST(SketchAdd, AgreesWithTheWorkedExample) {
  auto backend = *MakeBackend("cpu");
  const SketchArgs args = {SketchSalt(42, 1, 0, 0), 1, 150, 1};
  EXPECT_EQ(args.salt, 0xDF77324ADBD0B4A3u);
  const std::vector<uint32_t> positions = {3, 10, 64};
  const std::vector<int32_t> integers = {20, -7, 1};
  std::vector<uint8_t> cells(150, 0), expected(150, 0);
  backend->SketchAdd(positions.data(), integers.data(), 3, args, cells.data(), nullptr);
  for (const auto& [cell, value] :
       {std::pair{16, 0xF9}, {26, 0x01}, {34, 0x14}, {93, 0x0E}, {107, 0x14}, {124, 0x01}, {138, 0xF9}}) {
    expected[static_cast<size_t>(cell)] = static_cast<uint8_t>(value);
  }
  EXPECT_EQ(cells, expected);
}

struct Sample {
  std::vector<uint32_t> positions;
  std::vector<int32_t> integers;
};

Sample MakeSample(size_t n, int limit, std::mt19937_64& random) {
  std::set<uint32_t> unique;
  while (unique.size() < n) unique.insert(static_cast<uint32_t>(random()));
  Sample s;
  s.positions.assign(unique.begin(), unique.end());
  for (size_t i = 0; i < n; ++i)
    s.integers.push_back(static_cast<int32_t>(random() % (2 * uint64_t{static_cast<uint32_t>(limit)} + 1)) - limit);
  return s;
}

TEST(SketchPeel, RecoversEverySumExactly) {
  auto backend = *MakeBackend("cpu");
  std::mt19937_64 random(11);
  for (int width : {1, 2, 4}) {
    for (size_t n : {0u, 1u, 2u, 10u, 1000u, 20'000u}) {
      const uint32_t groups = static_cast<uint32_t>(n / 8192 + 1);
      const uint32_t third = static_cast<uint32_t>(static_cast<double>(n) / groups * 0.48 + 60);
      const SketchArgs args = {random(), groups, 3 * third, width};
      const Sample s = MakeSample(n, width == 1 ? 127 : width == 2 ? 32767 : 1 << 30, random);
      std::vector<uint8_t> cells(size_t{groups} * 3 * third * width, 0);
      backend->SketchAdd(s.positions.data(), s.integers.data(), n, args, cells.data(), nullptr);
      std::vector<int32_t> sums(n);
      std::vector<uint8_t> resolved(n);
      backend->SketchPeel(cells.data(), args, s.positions.data(), n, sums.data(), resolved.data(), nullptr);
      EXPECT_EQ(std::count(resolved.begin(), resolved.end(), 1), static_cast<ptrdiff_t>(n)) << n << ", width " << width;
      EXPECT_EQ(sums, s.integers);
    }
  }
}

TEST(SketchPeel, LeavesTheCoreUnresolvedAndIsRightAboutTheRest) {
  auto backend = *MakeBackend("cpu");
  std::mt19937_64 random(12);
  const size_t n = 5000;
  for (double ratio : {0.3, 0.6, 1.0, 1.15}) {
    const uint32_t third = static_cast<uint32_t>(ratio * n / 3);
    const SketchArgs args = {random(), 1, 3 * third, 1};
    const Sample s = MakeSample(n, 100, random);
    std::vector<uint8_t> cells(3 * third, 0);
    backend->SketchAdd(s.positions.data(), s.integers.data(), n, args, cells.data(), nullptr);
    std::vector<int32_t> sums(n);
    std::vector<uint8_t> resolved(n);
    backend->SketchPeel(cells.data(), args, s.positions.data(), n, sums.data(), resolved.data(), nullptr);
    size_t unresolved = 0;
    std::vector<uint32_t> load(3 * third, 0);
    for (size_t i = 0; i < n; ++i) {
      if (resolved[i] != 0) {
        ASSERT_EQ(sums[i], s.integers[i]);
        continue;
      }
      ++unresolved;
      ASSERT_EQ(sums[i], 0);
      for (uint32_t c : CellsOf(s.positions[i], args.salt, 1, third).cell) ++load[c];
    }
    EXPECT_GT(unresolved, n / 10) << ratio;
    // What is left is the 2-core: no cell with a single unresolved element remains.
    for (uint32_t l : load) ASSERT_NE(l, 1u);
  }
}

TEST(AddCells, WrapsAndInverts) {
  auto backend = *MakeBackend("cpu");
  std::mt19937_64 random(13);
  for (int width : {1, 2, 4}) {
    for (size_t n : {0u, 1u, 31u, 32u, 33u, 1000u}) {
      std::vector<uint8_t> acc(n * width), cells(n * width + 1);
      for (uint8_t& b : acc) b = static_cast<uint8_t>(random());
      for (uint8_t& b : cells) b = static_cast<uint8_t>(random());
      const std::vector<uint8_t> before = acc;
      backend->AddCells(acc.data(), cells.data() + 1, width, n, Sign::kAdd, nullptr);
      if (n > 0) {
        EXPECT_EQ(acc[0], static_cast<uint8_t>(before[0] + cells[1]));
      }
      backend->AddCells(acc.data(), cells.data() + 1, width, n, Sign::kSubtract, nullptr);
      EXPECT_EQ(acc, before);
    }
  }
}

}  // namespace
}  // namespace gradwire::kernels

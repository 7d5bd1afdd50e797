// Sketch geometry: enough cells to peel, monotone, bounded, and stable from round to round.
#include "common/codec/tagc/geometry.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "kernels/backend.h"

namespace gradwire::tagc {
namespace {

// Fraction of n elements that peeling leaves behind, over several salts.
double Unresolved(const Geometry& geometry, uint32_t n, int trials, kernels::Backend& backend) {
  std::vector<uint32_t> positions(n);
  std::iota(positions.begin(), positions.end(), 0u);
  std::vector<int32_t> sums(n);
  std::vector<uint8_t> resolved(n);
  const std::vector<uint8_t> cells(size_t{geometry.groups} * geometry.cells_per_group, 0);
  uint64_t left = 0;
  for (int t = 0; t < trials; ++t) {
    const kernels::SketchArgs args = {static_cast<uint64_t>(t) * 7919 + n, geometry.groups, geometry.cells_per_group,
                                      1};
    backend.SketchPeel(cells.data(), args, positions.data(), n, sums.data(), resolved.data(), nullptr);
    for (uint8_t r : resolved) left += r == 0;
  }
  return static_cast<double>(left) / (static_cast<double>(n) * trials);
}

TEST(Geometry, PeelsEveryLoadItIsMadeFor) {
  auto backend = *kernels::MakeBackend("cpu");
  for (uint32_t n :
       {1u, 2u, 5u, 16u, 64u, 100u, 300u, 600u, 1000u, 3000u, 8192u, 12'000u, 12'500u, 20'000u, 100'000u}) {
    const int trials = static_cast<int>(std::max(30u, 400'000u / n));
    EXPECT_LE(Unresolved(GeometryFor(n, 1), n, trials, *backend), 3e-4) << n;
  }
}

TEST(Geometry, HalfTheCellsDoNotPeel) {
  auto backend = *kernels::MakeBackend("cpu");
  EXPECT_GT(Unresolved(GeometryFor(10'000, 0.5), 10'000, 3, *backend), 0.5);
}

TEST(Geometry, CapacityInvertsGeometry) {
  for (double slack : {0.5, 1.0, 2.0}) {
    for (double n : {20.0, 1000.0, 8192.0, 100'000.0, 3e6}) {
      EXPECT_NEAR(CapacityOf(GeometryFor(n, slack), slack), n, 0.02 * n + 4) << n;
    }
  }
}

TEST(Geometry, StaysWithinItsLimits) {
  for (uint64_t elements : {1u, 2u, 100u, 5000u, 1'000'000u}) {
    for (double density : {1e-4, 0.01, 0.3, 1.0}) {
      for (uint32_t workers : {1u, 8u, 1000u}) {
        for (double slack : {0.1, 1.0, 8.0}) {
          const GeometryLimits limits = LimitsFor(elements, density, workers, slack);
          for (uint64_t seen : {uint64_t{0}, elements / 2, elements}) {
            for (bool settled : {false, true}) {
              const Geometry current = GeometryFor(limits.max_union, slack);
              const Geometry next = NextGeometry(seen, 1, current, settled, slack, limits);
              EXPECT_TRUE(CheckGeometry(next, limits).ok())
                  << elements << " elements, density " << density << ", " << workers << " workers, slack " << slack
                  << ", seen " << seen << ": " << next.groups << " groups of " << next.cells_per_group << ", limit "
                  << limits.max_cells;
            }
          }
        }
      }
    }
  }
}

TEST(Geometry, RisesAtOnceAndFallsSlowly) {
  const GeometryLimits limits = LimitsFor(10'000'000, 0.1, 8, 1);
  const Geometry current = NextGeometry(100'000, 1, {}, false, 1, limits);
  EXPECT_EQ(NextGeometry(100'000, 1, current, true, 1, limits), current);
  EXPECT_GT(CapacityOf(NextGeometry(200'000, 1, current, true, 1, limits), 1), 200'000);
  const double after_a_drop = CapacityOf(NextGeometry(50'000, 1, current, true, 1, limits), 1);
  EXPECT_GT(after_a_drop, 90'000);
  EXPECT_LT(after_a_drop, 100'000);
  EXPECT_NEAR(CapacityOf(NextGeometry(100'000, 0.5, current, true, 1, limits), 1), 52'000, 1'500)
      << "follows the schedule of densities";
}

}  // namespace
}  // namespace gradwire::tagc

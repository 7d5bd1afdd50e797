// Sketch geometry: see geometry.h.
#include "common/codec/tagc/geometry.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "kernels/math/sketch.h"

namespace gradwire::tagc {
namespace {

constexpr double kPeelingThreshold = 1.2218;  // cells per element, three cells each
constexpr double kFiniteSize = 3.2;           // times the root of m
constexpr double kSmallGroup = 120;           // cells; what keeps two elements from sharing all three cells
constexpr double kSmallGroupUpTo = 128;       // elements; falls to 0 at kSmallGroupGone
constexpr double kSmallGroupGone = 768;
constexpr double kGroupSpread = 3.2;    // standard deviations of a group's load when there are several
constexpr double kLoadMargin = 1.03;    // union of the next round against that of this one
constexpr double kLoadSpread = 2;       // times the root of the union
constexpr double kSlowestFall = 0.92;   // of the capacity, per round
constexpr double kMinElements = 16;     // capacity of a bucket in which nothing was sent
constexpr double kDensityMargin = 1.1;  // a worker may exceed its density by this (select.h promises 1.05)
constexpr double kSmallBucket = 1024;   // elements
constexpr double kMaxThird = 1 << 20;

// The most that NextGeometry expects.
double Ceiling(const GeometryLimits& limits) {
  return kLoadMargin * limits.max_union + kLoadSpread * std::sqrt(limits.max_union);
}

}  // namespace

double CellsFor(double elements) {
  const double small = std::clamp((kSmallGroupGone - elements) / (kSmallGroupGone - kSmallGroupUpTo), 0.0, 1.0);
  return kPeelingThreshold * elements + kFiniteSize * std::sqrt(elements) + kSmallGroup * small;
}

Geometry GeometryFor(double elements, double slack) {
  const double groups = std::max(1.0, std::round(elements / kGroupElements));
  const double mean = elements / groups;
  const double load = groups > 1 ? mean + kGroupSpread * std::sqrt(mean) : mean;
  const double third = std::clamp(std::ceil(slack * CellsFor(load) / 3), 1.0, kMaxThird);
  return {static_cast<uint32_t>(groups), 3 * static_cast<uint32_t>(third)};
}

double CapacityOf(const Geometry& geometry, double slack) {
  double low = 0;
  double high = static_cast<double>(geometry.groups) * geometry.cells_per_group / slack;
  for (int i = 0; i < 40; ++i) {
    const double middle = (low + high) / 2;
    const double mean = middle / geometry.groups;
    const double load = geometry.groups > 1 ? mean + kGroupSpread * std::sqrt(mean) : mean;
    (slack * CellsFor(load) <= geometry.cells_per_group ? low : high) = middle;
  }
  return low;
}

GeometryLimits LimitsFor(uint64_t elements, double max_density, uint32_t max_workers, double slack) {
  const double n = static_cast<double>(elements);
  GeometryLimits limits;
  limits.max_union = std::min(n, n * max_density * kDensityMargin * max_workers + kSmallBucket);
  const double loaded = kLoadMargin * limits.max_union + kLoadSpread * std::sqrt(limits.max_union);
  // Rounding to whole groups moves the load of a group by less than half.
  limits.max_cells = static_cast<uint64_t>(std::max(1.0, slack) * (1.5 * loaded + 1024));
  return limits;
}

GeometryLimits LimitsFor(const TagcSpec& spec, uint64_t elements, uint32_t max_workers) {
  const double density = spec.warmup_rounds != 0 ? std::max(spec.density, spec.warmup_density) : spec.density;
  return LimitsFor(elements, density, max_workers, spec.slack);
}

Geometry NextGeometry(uint64_t union_elements, double growth, const Geometry& current, bool settled, double slack,
                      const GeometryLimits& limits) {
  const double seen = std::max(static_cast<double>(union_elements), std::min(kMinElements, limits.max_union));
  double expected = std::min(seen * growth, limits.max_union);
  expected = kLoadMargin * expected + kLoadSpread * std::sqrt(expected);
  if (settled) {
    expected = std::max(expected, std::min(kSlowestFall * CapacityOf(current, slack) * growth, Ceiling(limits)));
  }
  return GeometryFor(expected, slack);
}

Geometry ShareOfGeometry(double capacity, double share, double slack, const GeometryLimits& limits) {
  const double expected = capacity * share;
  return GeometryFor(std::min(expected + kLoadSpread * std::sqrt(expected), Ceiling(limits)), slack);
}

absl::Status CheckGeometry(const Geometry& geometry, const GeometryLimits& limits) {
  if (geometry.groups != 0 && geometry.cells_per_group != 0 && geometry.cells_per_group % 3 == 0 &&
      geometry.cells_per_group <= 3 * kMaxThird &&
      uint64_t{geometry.groups} * geometry.cells_per_group <= limits.max_cells) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("sketch of %d groups of %d cells; a multiple of 3 and at most %d cells in all are allowed",
                      geometry.groups, geometry.cells_per_group, limits.max_cells));
}

}  // namespace gradwire::tagc

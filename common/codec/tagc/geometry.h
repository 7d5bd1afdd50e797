// How many groups and cells a sketch gets: what peeling needs for the number of elements that are expected.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "common/codec/codec.h"

namespace gradwire::tagc {

// Elements of a group that fills: its cells fit a core's L2 cache (or, 8 bits wide, a thread block's shared memory).
inline constexpr uint32_t kGroupElements = 8192;

struct Geometry {
  uint32_t groups = 0;
  uint32_t cells_per_group = 0;  // a multiple of 3
  bool operator==(const Geometry&) const = default;
};

// Cells of one group of m elements such that peeling leaves at most 1e-4 of them, on average over hashes. Three cells
// per element peel completely above 1.2218 m cells (Molloy 2004, "The pure literal rule threshold and cores in random
// hypergraphs"). The terms for finite m cover what a simulation of 20,000 to 400,000 hypergraphs per m asked for:
// m      2   8   32   128   256   512   1024   2048   4096   8192   16384
// cells 66 123  168   312   426   699   1350   2631   5181  10239   20358
// (Below m = 1000 it is pairs of elements that share all three cells, not the threshold, that decide.)
double CellsFor(double elements);

// Geometry for a union of `elements` over all workers. `slack` multiplies the cells.
Geometry GeometryFor(double elements, double slack);

// The number of elements a geometry is good for: the inverse of GeometryFor.
double CapacityOf(const Geometry& geometry, double slack);

// What a bucket and its codec allow; computed once.
struct GeometryLimits {
  double max_union = 0;    // elements: what max_workers may send together
  uint64_t max_cells = 0;  // over all groups
};
GeometryLimits LimitsFor(uint64_t elements, double max_density, uint32_t max_workers, double slack);
GeometryLimits LimitsFor(const TagcSpec& spec, uint64_t elements, uint32_t max_workers);

// The geometry of the next round from the union of this one. `growth`: density of the next round over that of this
// one. `current`: this round's geometry; it shrinks by at most a few percent per round, so that a worker that misses
// one round does not overload the next. Deterministic.
Geometry NextGeometry(uint64_t union_elements, double growth, const Geometry& current, bool settled, double slack,
                      const GeometryLimits& limits);

// The geometry of a shard that owns `share` of the elements of others, whose sketches together were good for `capacity`
// elements: as many cells per element, and the spread of a smaller sample.
Geometry ShareOfGeometry(double capacity, double share, double slack, const GeometryLimits& limits);

// Errors: InvalidArgument for a geometry that no shard of this codec would publish.
absl::Status CheckGeometry(const Geometry& geometry, const GeometryLimits& limits);

}  // namespace gradwire::tagc

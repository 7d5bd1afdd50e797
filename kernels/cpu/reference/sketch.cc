// Reference backend: adding to a sketch, merging sketches, and peeling one group after the other.
#include "kernels/math/sketch.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/cpu/reference/clones.h"
#include "kernels/cpu/reference/loops.h"

namespace gradwire::kernels::reference {
namespace {

template <typename T>
void AddToCells(const uint32_t* positions, const int32_t* integers, size_t n, const SketchArgs& args, uint8_t* cells) {
  const uint32_t third = args.cells_per_group / 3;
  for (size_t i = 0; i < n; ++i) {
    const SketchCells at = CellsOf(positions[i], args.salt, args.groups, third);
    uint8_t* group = cells + size_t{at.group} * args.cells_per_group * sizeof(T);
    for (uint32_t cell : at.cell) {
      T value;
      std::memcpy(&value, group + size_t{cell} * sizeof(T), sizeof(T));
      value = static_cast<T>(value + static_cast<T>(integers[i]));
      std::memcpy(group + size_t{cell} * sizeof(T), &value, sizeof(T));
    }
  }
}

template <typename T>
inline __attribute__((always_inline)) void MergeCells(uint8_t* acc, const uint8_t* cells, size_t n, T sign) {
  for (size_t i = 0; i < n; ++i) {
    T a, b;
    std::memcpy(&a, acc + i * sizeof(T), sizeof(T));
    std::memcpy(&b, cells + i * sizeof(T), sizeof(T));
    a = static_cast<T>(a + uint32_t{sign} * uint32_t{b});  // not in int, where 16-bit factors can overflow
    std::memcpy(acc + i * sizeof(T), &a, sizeof(T));
  }
}

// One group's hypergraph: elements are edges of three cells. A cell knows how many unresolved elements fall onto it
// and the exclusive or of their numbers, so the last one's number needs no list.
struct Cell {
  uint32_t elements = 0;
  uint32_t xor_of_elements = 0;
  uint32_t value = 0;  // modulo 2^(8 * cell bytes); bits above are not significant
};

struct Edge {
  uint32_t cell[3];
};

class GroupPeeler {
 public:
  explicit GroupPeeler(const SketchArgs& args) : args_(args), cells_(args.cells_per_group) {}

  // Resolves what it can of the group's elements `order[0 .. n)`, which index `positions`, `sums` and `resolved`.
  void Peel(const uint8_t* group, const uint32_t* positions, const uint32_t* order, size_t n, int32_t* sums,
            uint8_t* resolved) {
    LoadCells(group);
    LoadEdges(positions, order, n);
    for (uint32_t c = 0; c < cells_.size(); ++c) {
      if (cells_[c].elements == 1) ready_.push_back(c);
    }
    while (!ready_.empty()) {
      const uint32_t c = ready_.back();
      ready_.pop_back();
      if (cells_[c].elements != 1) continue;  // resolved through another of its cells meanwhile
      const uint32_t element = cells_[c].xor_of_elements;
      const uint32_t value = cells_[c].value;
      sums[order[element]] = SignExtend(value);
      resolved[order[element]] = 1;
      for (uint32_t other : edges_[element].cell) {
        Cell& cell = cells_[other];
        cell.value -= value;
        cell.xor_of_elements ^= element;
        if (--cell.elements == 1) ready_.push_back(other);
      }
    }
  }

 private:
  void LoadCells(const uint8_t* group) {
    for (size_t c = 0; c < cells_.size(); ++c) {
      uint32_t value = 0;
      std::memcpy(&value, group + c * static_cast<size_t>(args_.cell_bytes), static_cast<size_t>(args_.cell_bytes));
      cells_[c] = {0, 0, value};
    }
  }

  void LoadEdges(const uint32_t* positions, const uint32_t* order, size_t n) {
    edges_.resize(n);
    const uint32_t third = args_.cells_per_group / 3;
    for (uint32_t i = 0; i < n; ++i) {
      const SketchCells at = CellsOf(positions[order[i]], args_.salt, args_.groups, third);
      for (int j = 0; j < 3; ++j) {
        edges_[i].cell[j] = at.cell[j];
        Cell& cell = cells_[at.cell[j]];
        ++cell.elements;
        cell.xor_of_elements ^= i;
      }
    }
  }

  int32_t SignExtend(uint32_t value) const {
    switch (args_.cell_bytes) {
      case 1:
        return static_cast<int8_t>(value);
      case 2:
        return static_cast<int16_t>(value);
      default:
        return static_cast<int32_t>(value);
    }
  }

  const SketchArgs args_;
  std::vector<Cell> cells_;
  std::vector<Edge> edges_;
  std::vector<uint32_t> ready_;  // cells that hold one element, or held one when they were pushed
};

}  // namespace

void SketchAdd(const uint32_t* positions, const int32_t* integers, size_t n, const SketchArgs& args, uint8_t* cells) {
  switch (args.cell_bytes) {
    case 1:
      AddToCells<uint8_t>(positions, integers, n, args, cells);
      break;
    case 2:
      AddToCells<uint16_t>(positions, integers, n, args, cells);
      break;
    default:
      AddToCells<uint32_t>(positions, integers, n, args, cells);
      break;
  }
}

GW_CLONES void AddCells(uint8_t* acc, const uint8_t* cells, int width, size_t n, Sign sign) {
  const int factor = static_cast<int>(sign);
  switch (width) {
    case 1:
      MergeCells<uint8_t>(acc, cells, n, static_cast<uint8_t>(factor));
      break;
    case 2:
      MergeCells<uint16_t>(acc, cells, n, static_cast<uint16_t>(factor));
      break;
    default:
      MergeCells<uint32_t>(acc, cells, n, static_cast<uint32_t>(factor));
      break;
  }
}

void SketchPeel(const uint8_t* cells, const SketchArgs& args, const uint32_t* positions, size_t n, int32_t* sums,
                uint8_t* resolved) {
  std::fill(sums, sums + n, 0);
  std::fill(resolved, resolved + n, uint8_t{0});
  if (n == 0 || args.groups == 0) return;
  // Counting sort of the elements by group.
  std::vector<uint32_t> group_of(n);
  std::vector<uint32_t> end(args.groups, 0);
  for (size_t i = 0; i < n; ++i) {
    group_of[i] = SketchGroup(SketchHash(positions[i], args.salt), args.groups);
    ++end[group_of[i]];
  }
  uint32_t begin = 0;
  for (uint32_t& e : end) {
    const uint32_t count = e;
    e = begin;
    begin += count;
  }
  std::vector<uint32_t> order(n);
  for (size_t i = 0; i < n; ++i) order[end[group_of[i]]++] = static_cast<uint32_t>(i);

  GroupPeeler peeler(args);
  const size_t group_bytes = size_t{args.cells_per_group} * static_cast<size_t>(args.cell_bytes);
  begin = 0;
  for (uint32_t g = 0; g < args.groups; ++g) {
    peeler.Peel(cells + g * group_bytes, positions, order.data() + begin, end[g] - begin, sums, resolved);
    begin = end[g];
  }
}

}  // namespace gradwire::kernels::reference

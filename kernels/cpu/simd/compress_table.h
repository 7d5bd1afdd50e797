// Which lanes of eight a mask keeps, for vectors without an instruction for it.
#pragma once

#include <cstdint>

namespace gradwire::kernels {

struct CompressTable {
  uint32_t lanes[256];  // nibble i: the number of the i-th lane that is kept
};

inline constexpr CompressTable kCompressTable = [] {
  CompressTable table = {};
  for (uint32_t mask = 0; mask < 256; ++mask) {
    int kept = 0;
    for (uint32_t lane = 0; lane < 8; ++lane) {
      if ((mask >> lane & 1) != 0) table.lanes[mask] |= lane << (4 * kept++);
    }
  }
  return table;
}();

}  // namespace gradwire::kernels

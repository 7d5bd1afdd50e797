// Bit-sliced counters against plain ones.
#include "common/codec/tagc/position_counters.h"

#include <gtest/gtest.h>

#include <random>

namespace gradwire::tagc {
namespace {

TEST(PositionCounters, CountLikeIntegersAndRefuseToWrap) {
  std::mt19937_64 random(3);
  for (uint64_t elements : {1u, 63u, 64u, 65u, 1000u}) {
    for (uint32_t max_count : {1u, 2u, 3u, 4u, 64u}) {
      PositionCounters counters(elements, max_count);
      std::vector<uint32_t> counts(elements, 0);
      std::vector<std::vector<uint32_t>> added;
      const uint32_t capacity = (1u << std::bit_width(max_count)) - 1;
      for (int step = 0; step < 300; ++step) {
        if (!added.empty() && random() % 3 == 0) {
          const size_t which = random() % added.size();
          counters.Decrement(added[which]);
          for (uint32_t p : added[which]) --counts[p];
          added.erase(added.begin() + static_cast<ptrdiff_t>(which));
        } else {
          std::vector<uint32_t> positions;
          int64_t full = -1;
          for (uint32_t p = 0; p < elements; ++p) {
            if (random() % 3 != 0) continue;
            positions.push_back(p);
            if (full < 0 && counts[p] == capacity) full = p;
          }
          ASSERT_EQ(counters.Increment(positions), full);
          if (full < 0) {
            for (uint32_t p : positions) ++counts[p];
            added.push_back(positions);
          }
        }
        std::vector<uint32_t> expected;
        for (uint32_t p = 0; p < elements; ++p) {
          if (counts[p] != 0) expected.push_back(p);
        }
        ASSERT_EQ(counters.Union(), expected);
      }
    }
  }
}

}  // namespace
}  // namespace gradwire::tagc

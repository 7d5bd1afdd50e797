// Indices of bitmaps, by what every machine has and by the best of this one.
#include "kernels/cpu/bitmap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <type_traits>
#include <vector>

namespace gradwire::kernels {
namespace {

using Function = size_t (*)(const uint64_t* words, size_t count, uint32_t first, uint32_t* out);

class Indices : public ::testing::TestWithParam<Function> {};

TEST_P(Indices, AreThoseOfTheOneBits) {
  constexpr uint32_t kFirst = 4'000'000'000;  // indices wrap
  constexpr uint32_t kUntouched = 7;
  std::mt19937_64 random(20261122);
  for (double density : {0.0, 0.001, 0.02, 0.06, 0.1, 0.24, 0.26, 0.5, 0.98, 1.0}) {
    for (size_t count : {0, 1, 2, 63, 64, 65, 300}) {
      std::vector<uint64_t> words(count);
      std::vector<uint32_t> expected;
      std::bernoulli_distribution one(density);
      for (size_t i = 0; i < 64 * count; ++i) {
        if (!one(random)) continue;
        words[i / 64] |= uint64_t{1} << (i % 64);
        expected.push_back(kFirst + static_cast<uint32_t>(i));
      }
      std::vector<uint32_t> out(expected.size() + kIndexRoom + 1, kUntouched);
      const size_t n = GetParam()(words.data(), count, kFirst, out.data());
      EXPECT_EQ(out.back(), kUntouched) << "wrote behind the room it has: " << density << ", " << count;
      out.resize(n);
      ASSERT_EQ(out, expected) << density << ", " << count;
    }
  }
}

TEST_P(Indices, OfFullWordsBesideEmptyOnes) {
  for (size_t full : {0, 1, 5, 63, 64, 127}) {
    std::vector<uint64_t> words(128);
    words[full] = ~uint64_t{0};
    std::vector<uint32_t> out(64 + kIndexRoom);
    ASSERT_EQ(GetParam()(words.data(), words.size(), 0, out.data()), 64u);
    for (uint32_t i = 0; i < 64; ++i) ASSERT_EQ(out[i], full * 64 + i);
  }
}

INSTANTIATE_TEST_SUITE_P(ByBit, Indices, ::testing::Values(&IndicesByBit));
INSTANTIATE_TEST_SUITE_P(OfThisMachine, Indices, ::testing::Values(&IndicesOf));

template <typename Cell>
class Nonzero : public ::testing::Test {
 protected:
  using Take = size_t (*)(Cell* cells, uint32_t first, uint32_t* numbers, int32_t* values);

  static void IsTakenBy(Take take) {
    std::mt19937_64 random(1);
    constexpr Cell kTop = Cell{1} << (8 * sizeof(Cell) - 1);
    const Cell values[] = {1, 2, 127, 128, kTop, kTop - 1, static_cast<Cell>(-1), 64};
    for (int round = 0; round < 2000; ++round) {
      Cell cells[64] = {};
      std::vector<uint32_t> numbers;
      std::vector<int32_t> held;
      for (uint32_t i = 0; i < 64; ++i) {
        if (random() % 64 >= static_cast<uint64_t>(round % 65)) continue;
        cells[i] = values[random() % 8];
        numbers.push_back(4'000'000'000 + i);
        held.push_back(static_cast<std::make_signed_t<Cell>>(cells[i]));
      }
      std::vector<uint32_t> taken(numbers.size() + kIndexRoom + 1, 7);
      std::vector<int32_t> those(taken.size(), 7);
      const size_t n = take(cells, 4'000'000'000, taken.data(), those.data());
      EXPECT_EQ(taken.back(), 7u) << "wrote behind the room it has";
      EXPECT_EQ(those.back(), 7) << "wrote behind the room it has";
      taken.resize(n);
      those.resize(n);
      ASSERT_EQ(taken, numbers);
      ASSERT_EQ(those, held);
      ASSERT_TRUE(std::all_of(std::begin(cells), std::end(cells), [](Cell cell) { return cell == 0; }));
    }
  }
};
using Cells = ::testing::Types<uint8_t, uint16_t, uint32_t>;
TYPED_TEST_SUITE(Nonzero, Cells);

TYPED_TEST(Nonzero, IsTaken) {
  this->IsTakenBy(&TakeNonzero);
  if constexpr (sizeof(TypeParam) == 1) this->IsTakenBy(&TakeNonzeroByCell);
}

TEST(UnionOf, HasTheBitsOfAnyPlane) {
  const std::vector<uint64_t> planes = {1, 0, 2, 0, 3, uint64_t{1} << 63};  // three planes of two words
  std::vector<uint64_t> any(2);
  EXPECT_EQ(UnionOf(planes.data(), 3, 2, any.data()), 3u);
  EXPECT_EQ(any, (std::vector<uint64_t>{3, uint64_t{1} << 63}));
}

}  // namespace
}  // namespace gradwire::kernels

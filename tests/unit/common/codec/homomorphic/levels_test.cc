// What homomorphic codecs are made of: the transform, the table, ranges, packed levels.
#include "common/codec/homomorphic/levels.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <span>

#include "common/codec/bits/index_code.h"
#include "common/codec/bits/level_bits.h"
#include "common/codec/codec.h"
#include "common/codec/homomorphic/hadamard.h"
#include "common/codec/homomorphic/thc_table.h"

namespace gradwire::homomorphic {
namespace {

TEST(Hadamard, IsItsMatrix) {
  std::mt19937 random(1);
  for (size_t d : {1, 2, 4, 8, 16, 32, 64, 128, 512}) {
    std::vector<float> x(d);
    for (float& v : x) v = static_cast<float>(static_cast<int>(random() % 2001) - 1000);
    const std::vector<float> before = x;
    Hadamard(x.data(), d);
    for (size_t i = 0; i < d; ++i) {
      float sum = 0;  // integers: exact
      for (size_t j = 0; j < d; ++j) sum += std::popcount(i & j) % 2 == 0 ? before[j] : -before[j];
      ASSERT_EQ(x[i], sum) << d << " numbers, " << i;
    }
    Hadamard(x.data(), d);
    for (size_t i = 0; i < d; ++i) ASSERT_EQ(x[i], static_cast<float>(d) * before[i]);
  }
}

TEST(ThcTable, NormalRangeLeavesOutItsPart) {
  EXPECT_NEAR(NormalRange(1.0 / 32), 2.153874694061456, 1e-8);
  EXPECT_NEAR(NormalRange(0.5), 0.674489750196082, 1e-8);
  for (double p : {0.3, 0.01, 1e-4}) EXPECT_NEAR(std::erfc(NormalRange(p) / std::sqrt(2.0)), p, 1e-6 * p + 1e-8);
}

// The expected squared error for a normal number within the range, by sums.
double ErrorOf(std::span<const int8_t> table, int half, double t) {
  constexpr int kSteps = 8000;
  double error = 0;
  size_t above = 1;
  for (int k = 0; k < kSteps; ++k) {
    const double z = t * (2 * (k + 0.5) / kSteps - 1);
    while (z > t * table[above] / half) ++above;
    error += (t * table[above] / half - z) * (z - t * table[above - 1] / half) * std::exp(-z * z / 2);
  }
  return error;
}

TEST(ThcTable, NoOtherTableIsBetter) {
  constexpr int kHalf = 8;
  for (double p : {0.3, 1.0 / 32, 1e-3}) {
    const double t = NormalRange(p);
    double least = std::numeric_limits<double>::infinity();
    std::vector<int8_t> best;
    // All symmetric tables of 8 entries: three of 1 .. 7, and 8.
    for (int8_t a = 1; a < kHalf; ++a)
      for (int8_t b = static_cast<int8_t>(a + 1); b < kHalf; ++b)
        for (int8_t c = static_cast<int8_t>(b + 1); c < kHalf; ++c) {
          const std::vector<int8_t> table = {
              -kHalf, static_cast<int8_t>(-c), static_cast<int8_t>(-b), static_cast<int8_t>(-a), a, b, c, kHalf};
          if (const double error = ErrorOf(table, kHalf, t); error < least) {
            least = error;
            best = table;
          }
        }
    EXPECT_EQ(ThcTable(3, 2 * kHalf, p), best) << p;
  }
}

TEST(ThcTable, AllEntriesAreTakenWhereThereAreNoMore) {
  const std::vector<int8_t> table = ThcTable(2, 4, 0.1);
  EXPECT_EQ(table, (std::vector<int8_t>{-2, -1, 1, 2}));
  EXPECT_EQ(ThcTable(1, 254, 0.1), (std::vector<int8_t>{-127, 127}));
  // As WIRE.md says.
  EXPECT_EQ(ThcTable(4, 30, 1.0 / 32),
            (std::vector<int8_t>{-15, -12, -10, -8, -6, -4, -2, -1, 1, 2, 4, 6, 8, 10, 12, 15}));
}

TEST(Levels, RangesAreTheLeastThatHold) {
  for (int range = kLeastRange + 1; range < kLargestRange; ++range) {
    EXPECT_NEAR(std::log2(MagnitudeOf(range)), range / 2.0, 1e-12);
    EXPECT_EQ(RangeOf(MagnitudeOf(range)), range);
    EXPECT_EQ(RangeOf(MagnitudeOf(range) * 1.0001), range + 1);
  }
  EXPECT_EQ(RangeOf(0), kLeastRange);
  EXPECT_EQ(RangeOf(1e30), kLargestRange);
}

TEST(HomomorphicCodec, RefusesMoreWorkersThanItsSumsHaveRoomFor) {
  const auto made = [](const std::string& codec, uint32_t workers) {
    v1::JobSpec spec;
    spec.set_name("job");
    spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_SGD);
    spec.set_codec(codec);
    spec.set_max_workers(workers);
    spec.add_tensors()->set_name("w");
    spec.mutable_tensors(0)->add_shape(10);
    const Job job = *Job::Make(spec);
    const Layout layout = *Layout::Make(job, 1);
    const auto backend = *kernels::MakeBackend("reference");
    return MakeCodec({&job, &layout.at(0, 0), backend.get()}).status();
  };
  EXPECT_EQ(made("uniform:bits=8", 4000), absl::OkStatus());
  EXPECT_EQ(made("thc", 16000), absl::OkStatus());
  const absl::Status refused = made("uniform:bits=8", 5000);
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(refused.message()).find("lower max_workers, bits"), std::string::npos) << refused;
  EXPECT_FALSE(made("thc:granularity=254", 5000).ok());
}

TEST(LevelBits, AreTheBitStreamOfWire) {
  std::mt19937 random(2);
  for (int bits = 1; bits <= 8; ++bits) {
    for (size_t n : {0, 1, 7, 8, 9, 64, 1001}) {
      std::vector<uint8_t> levels(n), found(n);
      std::vector<int32_t> zigzag(n);
      for (size_t i = 0; i < n; ++i) {
        levels[i] = static_cast<uint8_t>(random() % (1u << bits));
        zigzag[i] = levels[i] % 2 == 0 ? levels[i] / 2 : -(levels[i] + 1) / 2;
      }
      std::vector<uint8_t> packed(LevelBytes(n, bits));
      PackLevels(levels.data(), n, bits, packed.data());
      EXPECT_EQ(packed, PackIntegers(zigzag, bits)) << n << " of " << bits << " bits";
      ASSERT_TRUE(UnpackLevels(packed.data(), n, bits, found.data()));
      EXPECT_EQ(found, levels);
      if (n * static_cast<size_t>(bits) % 8 == 0) continue;
      packed.back() |= 0x80;
      EXPECT_FALSE(UnpackLevels(packed.data(), n, bits, found.data())) << "padding that is not 0";
    }
  }
}

}  // namespace
}  // namespace gradwire::homomorphic

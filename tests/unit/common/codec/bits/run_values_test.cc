// Values of runs: round trips, sizes near the entropy, and refusal of everything malformed.
#include "common/codec/bits/run_values.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <random>

namespace gradwire {
namespace {

std::vector<int8_t> Decoded(const CodedRuns& coded, size_t count) {
  std::vector<int8_t> out = {7};  // replaced
  const absl::Status status = DecodeRuns(coded.coding, coded.payload, static_cast<uint32_t>(count), &out);
  EXPECT_TRUE(status.ok()) << status;
  return out;
}

void ExpectRefused(RunCoding coding, std::vector<uint8_t> payload, uint32_t count) {
  std::vector<int8_t> out = {7};
  const absl::Status status = DecodeRuns(coding, payload, count, &out);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_TRUE(out.empty());
}

// A walk that stays put, goes up or goes down by one, as neighbouring ranges do.
std::vector<int8_t> Walk(size_t n, double moves, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int8_t> out;
  int at = -20;
  for (size_t i = 0; i < n; ++i) {
    const double draw = static_cast<double>(random() >> 11) * 0x1p-53;
    if (draw < moves) at += draw < moves / 2 ? 1 : -1;
    at = std::clamp(at, -40, 23);
    out.push_back(static_cast<int8_t>(at));
  }
  return out;
}

TEST(RunValues, RoundTripAtEveryLength) {
  for (size_t n : {0u, 1u, 2u, 3u, 4u, 7u, 8u, 9u, 63u, 64u, 65u, 1000u}) {
    for (double moves : {0.0, 0.1, 0.5, 1.0}) {
      const std::vector<int8_t> values = Walk(n, moves, n);
      const CodedRuns coded = EncodeRuns(values);
      EXPECT_LE(coded.payload.size(), n);
      EXPECT_EQ(Decoded(coded, n), values);
    }
  }
}

TEST(RunValues, RoundTripWhateverTheyAre) {
  std::mt19937_64 random(5);
  std::vector<int8_t> values(4096);
  for (int8_t& v : values) v = static_cast<int8_t>(random());
  EXPECT_EQ(Decoded(EncodeRuns(values), values.size()), values);
  EXPECT_EQ(EncodeRuns(values).coding, RunCoding::kBytes);                           // nothing to be gained
  for (size_t i = 0; i < values.size(); ++i) values[i] = i % 512 == 0 ? 127 : -128;  // the longest differences
  const CodedRuns coded = EncodeRuns(values);
  EXPECT_EQ(coded.coding, RunCoding::kDifferences);
  EXPECT_EQ(Decoded(coded, values.size()), values);
}

TEST(RunValues, TakeWhatTheirDifferencesAreWorth) {
  for (double moves : {0.2, 0.5, 0.8}) {
    const std::vector<int8_t> values = Walk(20'000, moves, 11);
    std::map<int, double> counts;
    for (size_t i = 1; i < values.size(); ++i) counts[values[i] - values[i - 1]] += 1;
    double entropy = 0;
    for (const auto& [difference, n] : counts) entropy -= n * std::log2(n / static_cast<double>(values.size() - 1));
    EXPECT_LE(8.0 * static_cast<double>(EncodeRuns(values).payload.size()),
              entropy + 0.7 * static_cast<double>(values.size()))
        << moves;
  }
}

TEST(RunValues, RefuseWhatIsMalformed) {
  const std::vector<int8_t> values = Walk(100, 0.5, 3);
  const CodedRuns coded = EncodeRuns(values);
  ASSERT_EQ(coded.coding, RunCoding::kDifferences);
  ExpectRefused(static_cast<RunCoding>(2), coded.payload, 100);
  ExpectRefused(RunCoding::kBytes, coded.payload, 100);
  ExpectRefused(RunCoding::kDifferences, coded.payload, 99 - 8);  // bits are left over
  ExpectRefused(RunCoding::kDifferences, coded.payload, 200);     // too few
  ExpectRefused(RunCoding::kDifferences, coded.payload, 0);
  ExpectRefused(RunCoding::kDifferences, coded.payload, UINT32_MAX);
  ExpectRefused(RunCoding::kDifferences, {}, 1);
  ExpectRefused(RunCoding::kDifferences, {0}, 1);
  ExpectRefused(RunCoding::kDifferences, {10, 0, 1, 0}, 2);                  // parameter
  ExpectRefused(RunCoding::kDifferences, {0, 127, 0b100}, 2);                // 127 + 1
  ExpectRefused(RunCoding::kDifferences, {0, 0x80, 0b10}, 2);                // -128 - 1
  ExpectRefused(RunCoding::kDifferences, {0, 0, 0, 0, 0}, 2);                // no end
  ExpectRefused(RunCoding::kDifferences, std::vector<uint8_t>(1000, 0), 2);  // nor here
  ExpectRefused(RunCoding::kDifferences, {0, 5, 0b1000'0001}, 2);            // padding
  ExpectRefused(RunCoding::kDifferences, {0, 5, 1, 0}, 2);                   // a byte too many
  for (size_t cut = 0; cut < coded.payload.size(); ++cut)
    ExpectRefused(RunCoding::kDifferences, {coded.payload.begin(), coded.payload.begin() + static_cast<ptrdiff_t>(cut)},
                  100);
}

TEST(RunValues, AreThoseOfTheWorkedExample) {
  // -3, -3, -4, -3, 0: differences 0, -1, 1, 3 are 0, 1, 2, 6; with k = 0: 1 01 001 0000001
  std::vector<int8_t> out;
  ASSERT_TRUE(
      DecodeRuns(RunCoding::kDifferences, std::vector<uint8_t>{0, 0xFD, 0b0010'0101, 0b0001'0000}, 5, &out).ok());
  EXPECT_EQ(out, (std::vector<int8_t>{-3, -3, -4, -3, 0}));
}

}  // namespace
}  // namespace gradwire

// Index codes and integer packing: round trips, sizes near the entropy, and refusal of everything malformed.
#include "common/codec/bits/index_code.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace gradwire {
namespace {

std::vector<uint32_t> RandomPositions(uint32_t begin, uint32_t count, double density, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint32_t> out;
  for (uint32_t i = 0; i < count; ++i) {
    if (static_cast<double>(random() >> 11) * 0x1p-53 < density) out.push_back(begin + i);
  }
  return out;
}

void ExpectRoundTrip(const std::vector<uint32_t>& positions, uint32_t begin, uint32_t count) {
  const CodedIndex coded = EncodeIndex(positions, begin, count);
  EXPECT_LE(coded.payload.size(), (uint64_t{count} + 7) / 8);
  std::vector<uint32_t> decoded = {7};  // appended to
  const absl::Status status = DecodeIndex(coded.coding, coded.payload, begin, count, &decoded);
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_EQ(decoded.front(), 7u);
  decoded.erase(decoded.begin());
  ASSERT_EQ(decoded, positions);
}

TEST(IndexCode, RoundTripsEveryLengthAndDensity) {
  for (uint32_t begin : {0u, 65536u, 4'000'000'000u}) {
    for (uint32_t count : {0u, 1u, 2u, 7u, 8u, 9u, 63u, 64u, 65u, 1000u, 65536u}) {
      for (double density : {0.0, 0.0005, 0.01, 0.1, 0.5, 0.9, 1.0}) {
        ExpectRoundTrip(RandomPositions(begin, count, density, count), begin, count);
      }
      if (count > 0) {
        ExpectRoundTrip({begin}, begin, count);
        ExpectRoundTrip({begin + count - 1}, begin, count);
      }
    }
  }
}

TEST(IndexCode, RoundTripsClusters) {
  std::vector<uint32_t> positions;
  for (uint32_t i = 30'000; i < 31'000; ++i) positions.push_back(i);
  positions.push_back(65'535);
  ExpectRoundTrip(positions, 0, 65'536);
}

// Rows of a table that are touched here and there, and parts of such.
TEST(IndexCode, RoundTripsStretches) {
  std::mt19937_64 random(23);
  for (uint32_t begin : {0u, 7u, 4'000'000'000u}) {
    for (uint32_t least : {1u, 2u, 16u, 64u}) {
      for (uint32_t more : {0u, 1u, 5u, 48u}) {
        std::vector<uint32_t> positions;
        uint32_t next = begin;
        for (int i = 0; i < 300; ++i) {
          next += static_cast<uint32_t>(random() >> (50 + random() % 14));
          const uint32_t end = next + least + (more == 0 ? 0 : static_cast<uint32_t>(random() % (more + 1)));
          for (; next < end; ++next) positions.push_back(next);
          ++next;
        }
        ExpectRoundTrip(positions, begin, next - begin);
        ExpectRoundTrip(positions, begin, positions.back() - begin + 1);
      }
    }
  }
}

// 1 % of 2^14 rows of 64 elements: as numbers of rows they take a byte each.
TEST(IndexCode, RowsTakeAsMuchAsTheirNumbers) {
  const std::vector<uint32_t> rows = RandomPositions(0, 1u << 14, 0.01, 4);
  std::vector<uint32_t> positions;
  for (uint32_t row : rows) {
    for (uint32_t i = 0; i < 64; ++i) positions.push_back(64 * row + i);
  }
  const CodedIndex coded = EncodeIndex(positions, 0, 1u << 20);
  EXPECT_EQ(coded.coding, IndexCoding::kStretches);
  const size_t numbers = EncodeIndex(rows, 0, 1u << 14).payload.size();
  EXPECT_LE(coded.payload.size(), 3 * numbers) << "gaps are 64 times as long, and some rows follow each other";
}

// Codes are put together several at a time; among short ones there are some that fit no word.
TEST(IndexCode, RoundTripsLongGapsAmongShortOnes) {
  std::mt19937_64 random(17);
  for (size_t n : {2u, 4u, 5u, 8u, 255u, 256u, 257u, 260u, 261u, 1000u}) {
    for (uint64_t rare : {3u, 10u, 40u}) {
      std::vector<uint32_t> positions;
      uint32_t next = 5;
      for (size_t i = 0; i < n; ++i) {
        positions.push_back(next);
        next += 1 + static_cast<uint32_t>(random() >> (random() % rare == 0 ? 46 + random() % 14 : 60));
      }
      ExpectRoundTrip(positions, 5, next - 5);
    }
  }
}

TEST(IndexCode, ChoosesTheSmallestForm) {
  std::vector<uint32_t> holes = RandomPositions(0, 65536, 0.99, 1);
  EXPECT_EQ(EncodeIndex(holes, 0, 65536).coding, IndexCoding::kBitmap) << "of most positions";
  EXPECT_EQ(EncodeIndex({}, 0, 100).coding, IndexCoding::kEmpty);
  EXPECT_EQ(EncodeIndex(RandomPositions(0, 100, 1, 1), 0, 100).coding, IndexCoding::kFull);
  EXPECT_EQ(EncodeIndex(RandomPositions(0, 65536, 0.5, 1), 0, 65536).coding, IndexCoding::kBitmap);
  EXPECT_EQ(EncodeIndex(RandomPositions(0, 65536, 0.01, 1), 0, 65536).coding, IndexCoding::kRice);
  EXPECT_EQ(EncodeIndex(std::vector<uint32_t>{3, 60'000}, 0, 65536).payload, (std::vector<uint8_t>{3, 0, 0x60, 0xEA}));
  EXPECT_EQ(EncodeIndex(std::vector<uint32_t>{9, 100'000}, 9, 1u << 20).coding, IndexCoding::kCoordinates);
}

// ZEN's two forms: 32 bits per position and one per element are as much at a density of 1/32.
TEST(IndexCode, TakesTheFormThatIsAskedFor) {
  constexpr uint32_t kCount = 1000;
  for (uint32_t begin : {0u, 4'000'000'000u}) {
    for (uint32_t n : {0u, 1u, 31u, 32u, 500u, 999u, 1000u}) {
      SCOPED_TRACE(n);
      std::vector<uint32_t> positions;
      for (uint32_t i = 0; i < n; ++i) positions.push_back(begin + i * (n == 1000 ? 1 : kCount / std::max(n, 1u)));
      for (IndexForm form : {IndexForm::kAuto, IndexForm::kCoordinates, IndexForm::kBitmap}) {
        const CodedIndex coded = EncodeIndex(positions, begin, kCount, form);
        const uint32_t most = form == IndexForm::kBitmap ? 0 : form == IndexForm::kAuto ? 31 : 1000;
        EXPECT_EQ(coded.coding, n == 0      ? IndexCoding::kEmpty
                                : n <= most ? IndexCoding::kWideCoordinates
                                            : IndexCoding::kBitmap);
        EXPECT_EQ(coded.payload.size(), n == 0 ? 0 : n <= most ? 4 * n : kCount / 8);
        std::vector<uint32_t> decoded;
        ASSERT_TRUE(DecodeIndex(coded.coding, coded.payload, begin, kCount, &decoded).ok());
        EXPECT_EQ(decoded, positions);
      }
    }
  }
}

// The worked example of proto/WIRE.md, which was computed apart from this code.
TEST(IndexCode, AgreesWithTheWorkedExample) {
  const std::vector<uint32_t> positions = {3, 10, 64};
  const CodedIndex coded = EncodeIndex(positions, 0, 100);
  EXPECT_EQ(coded.coding, IndexCoding::kCoordinates);
  EXPECT_EQ(coded.payload, (std::vector<uint8_t>{3, 0, 10, 0, 64, 0}));
  EXPECT_EQ(EncodeIndex(positions, 0, 100, IndexForm::kAuto).payload,
            (std::vector<uint8_t>{3, 0, 0, 0, 10, 0, 0, 0, 64, 0, 0, 0}));
  const std::vector<uint8_t> rice = {3, 0, 0, 0, 3, 0xD7, 0xC0, 0x02};
  std::vector<uint32_t> decoded;
  EXPECT_TRUE(DecodeIndex(IndexCoding::kRice, rice, 0, 100, &decoded).ok());
  EXPECT_EQ(decoded, positions);
  const std::vector<uint8_t> stretches = {3, 0, 0, 0, 3, 1, 3, 0, 0, 0, 0xB7, 0x00, 0x15};
  decoded.clear();
  EXPECT_TRUE(DecodeIndex(IndexCoding::kStretches, stretches, 0, 100, &decoded).ok());
  const std::vector<uint32_t> all = {3, 4, 5, 6, 10, 11, 12, 64, 65, 66, 67};
  EXPECT_EQ(decoded, all);
}

TEST(IndexCode, IsNearTheEntropy) {
  for (double density : {0.001, 0.003, 0.01, 0.03, 0.1}) {
    const uint32_t count = 1u << 20;
    const auto positions = RandomPositions(0, count, density, 42);
    const double p = static_cast<double>(positions.size()) / count;
    const double entropy = count * (-p * std::log2(p) - (1 - p) * std::log2(1 - p)) / 8;
    EXPECT_LE(static_cast<double>(EncodeIndex(positions, 0, count).payload.size()), 1.05 * entropy) << density;
  }
}

TEST(IndexCode, RefusesMalformedPayloads) {
  const auto refuses = [](IndexCoding coding, std::vector<uint8_t> payload, uint32_t begin, uint32_t count) {
    std::vector<uint32_t> out = {1, 2};
    const absl::Status status = DecodeIndex(coding, payload, begin, count, &out);
    return status.code() == absl::StatusCode::kInvalidArgument && out.size() == 2;
  };
  EXPECT_TRUE(refuses(static_cast<IndexCoding>(7), {}, 0, 8));
  EXPECT_TRUE(refuses(IndexCoding::kEmpty, {0}, 0, 8));
  EXPECT_TRUE(refuses(IndexCoding::kFull, {0}, 0, 8));
  EXPECT_TRUE(refuses(IndexCoding::kFull, {}, 4'294'967'295u, 2));
  EXPECT_TRUE(refuses(IndexCoding::kBitmap, {}, 0, 8));
  EXPECT_TRUE(refuses(IndexCoding::kBitmap, {1, 0}, 0, 8));
  EXPECT_TRUE(refuses(IndexCoding::kBitmap, {0x80}, 0, 7)) << "a bit behind the end";
  EXPECT_TRUE(refuses(IndexCoding::kCoordinates, {}, 0, 8));
  EXPECT_TRUE(refuses(IndexCoding::kCoordinates, {1}, 0, 8));
  EXPECT_TRUE(refuses(IndexCoding::kCoordinates, {8, 0}, 0, 8)) << "outside";
  EXPECT_TRUE(refuses(IndexCoding::kCoordinates, {3, 0, 3, 0}, 0, 8)) << "twice the same";
  EXPECT_TRUE(refuses(IndexCoding::kCoordinates, {3, 0, 2, 0}, 9, 8)) << "descending";
  EXPECT_TRUE(refuses(IndexCoding::kCoordinates, {3, 0}, 0, 65'537)) << "half of one";
  EXPECT_TRUE(refuses(IndexCoding::kWideCoordinates, {3, 0}, 0, 8)) << "half of one";
  EXPECT_TRUE(refuses(IndexCoding::kWideCoordinates, {8, 0, 0, 0}, 0, 8)) << "outside";
  EXPECT_TRUE(refuses(IndexCoding::kWideCoordinates, {}, 0, 8));
  std::vector<uint32_t> spread;
  for (uint32_t i = 0; i < 16; ++i) spread.push_back(i * 61 + i % 3);
  const CodedIndex good = EncodeIndex(spread, 0, 1000);
  ASSERT_EQ(good.coding, IndexCoding::kRice);
  EXPECT_TRUE(refuses(IndexCoding::kRice, {}, 0, 1000));
  auto bad = good.payload;
  bad.pop_back();
  EXPECT_TRUE(refuses(IndexCoding::kRice, bad, 0, 1000)) << "truncated";
  bad = good.payload;
  bad.push_back(0);
  EXPECT_TRUE(refuses(IndexCoding::kRice, bad, 0, 1000)) << "a byte too many";
  bad = good.payload;
  bad[0] = 15;
  EXPECT_TRUE(refuses(IndexCoding::kRice, bad, 0, 1000)) << "one position fewer than coded";
  bad[0] = 0;
  EXPECT_TRUE(refuses(IndexCoding::kRice, bad, 0, 1000)) << "no position at all";
  bad = good.payload;
  bad[4] = 32;
  EXPECT_TRUE(refuses(IndexCoding::kRice, bad, 0, 1000)) << "parameter";
  EXPECT_TRUE(refuses(IndexCoding::kRice, good.payload, 0, 900)) << "position outside";
}

TEST(IndexCode, RefusesMalformedStretches) {
  const std::vector<uint8_t> good = {3, 0, 0, 0, 3, 1, 3, 0, 0, 0, 0xB7, 0x00, 0x15};
  const auto refuses = [&good](size_t at, uint8_t byte, uint32_t count = 100) {
    std::vector<uint8_t> payload = good;
    payload[at] = byte;
    std::vector<uint32_t> out = {1, 2};
    const absl::Status status = DecodeIndex(IndexCoding::kStretches, payload, 0, count, &out);
    return status.code() == absl::StatusCode::kInvalidArgument && out.size() == 2;
  };
  EXPECT_FALSE(refuses(0, 3)) << "as it is";
  EXPECT_FALSE(refuses(0, 3, 68));
  EXPECT_TRUE(refuses(0, 3, 67)) << "outside";
  EXPECT_TRUE(refuses(0, 0)) << "no stretch";
  EXPECT_TRUE(refuses(0, 2)) << "one fewer than coded";
  EXPECT_TRUE(refuses(0, 4)) << "one more than coded";
  EXPECT_TRUE(refuses(3, 0x80)) << "more than elements";
  EXPECT_TRUE(refuses(4, 32)) << "parameter of gaps";
  EXPECT_TRUE(refuses(5, 33)) << "bits of lengths";
  EXPECT_TRUE(refuses(6, 0)) << "of no position";
  EXPECT_TRUE(refuses(9, 0xFF)) << "longer than all elements";
  EXPECT_TRUE(refuses(12, 0x35)) << "padding";
  for (size_t size = 0; size < good.size(); ++size) {
    std::vector<uint32_t> out;
    EXPECT_FALSE(DecodeIndex(IndexCoding::kStretches, std::span(good).first(size), 0, 100, &out).ok()) << size;
    EXPECT_TRUE(out.empty());
  }
  std::vector<uint8_t> longer = good;
  longer.push_back(0);
  std::vector<uint32_t> out;
  EXPECT_FALSE(DecodeIndex(IndexCoding::kStretches, longer, 0, 100, &out).ok()) << "a byte too many";
}

TEST(IndexCode, RandomPayloadsNeverCrash) {
  std::mt19937_64 random(99);
  int decoded = 0, stretches = 0;
  for (int i = 0; i < 200'000; ++i) {
    std::vector<uint8_t> payload(random() % 40);
    for (uint8_t& b : payload) {  // a quarter of the bits
      const uint64_t half = random();
      b = static_cast<uint8_t>(half & random());
    }
    if (payload.size() >= 5) {  // a plausible header
      payload[0] = static_cast<uint8_t>(random() % 32);
      payload[1] = payload[2] = payload[3] = 0;
      payload[4] = static_cast<uint8_t>(random() % 34);
    }
    const auto coding = static_cast<IndexCoding>(random() % 8);
    if (coding == IndexCoding::kStretches && payload.size() >= 10) {
      payload.resize(10 + random() % 4);
      payload[0] = static_cast<uint8_t>(random() % 6);
      payload[4] = static_cast<uint8_t>(random() % 4);
      payload[5] = static_cast<uint8_t>(random() % 3);
      payload[6] = static_cast<uint8_t>(random() % 8);
      payload[7] = payload[8] = payload[9] = 0;
    }
    const uint32_t begin = static_cast<uint32_t>(random() >> (random() % 64));
    const uint32_t count = static_cast<uint32_t>(random() % 300);
    std::vector<uint32_t> out;
    if (!DecodeIndex(coding, payload, begin, count, &out).ok()) continue;
    ++(coding == IndexCoding::kStretches ? stretches : decoded);
    for (size_t k = 0; k < out.size(); ++k) {
      ASSERT_GE(out[k], begin);
      ASSERT_LT(out[k], uint64_t{begin} + count);
      ASSERT_TRUE(k == 0 || out[k] > out[k - 1]);
    }
  }
  EXPECT_GT(decoded, 100);
  EXPECT_GT(stretches, 100);
}

TEST(PackIntegers, RoundTripsEveryWidth) {
  std::mt19937_64 random(5);
  for (int bits = 1; bits <= 32; ++bits) {
    for (size_t n : {0u, 1u, 7u, 8u, 9u, 255u, 256u, 257u, 300u, 512u, 1000u, 1024u}) {
      std::vector<int32_t> values(n);
      for (int32_t& v : values) v = static_cast<int32_t>(random()) >> (32 - bits);
      EXPECT_LE(BitsFor(values), bits);
      const std::vector<uint8_t> packed = PackIntegers(values, bits);
      ASSERT_EQ(packed.size(), (n * static_cast<size_t>(bits) + 7) / 8);
      for (size_t i = 0; i < n * static_cast<size_t>(bits); ++i) {
        const int32_t v = values[i / static_cast<size_t>(bits)];
        const uint32_t zigzag = static_cast<uint32_t>(v) * 2 ^ (v < 0 ? 0xFFFFFFFFu : 0u);
        ASSERT_EQ(packed[i / 8] >> (i % 8) & 1, zigzag >> (i % static_cast<size_t>(bits)) & 1) << bits << ", bit " << i;
      }
      std::vector<int32_t> back(n);
      const absl::Status status = UnpackIntegers(packed, bits, n, back.data());
      ASSERT_TRUE(status.ok()) << status;
      ASSERT_EQ(back, values) << bits;
    }
  }
  const std::vector<int32_t> extremes = {std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max(), 0,
                                         -1};
  EXPECT_EQ(BitsFor(extremes), 32);
  std::vector<int32_t> back(4);
  ASSERT_TRUE(UnpackIntegers(PackIntegers(extremes, 32), 32, 4, back.data()).ok());
  EXPECT_EQ(back, extremes);
  EXPECT_EQ(BitsFor(std::vector<int32_t>{}), 1);
  EXPECT_EQ(BitsFor(std::vector<int32_t>{0, -1}), 1);
  EXPECT_EQ(BitsFor(std::vector<int32_t>{1}), 2);
  EXPECT_EQ(BitsFor(std::vector<int32_t>{-32}), 6);
  EXPECT_EQ(BitsFor(std::vector<int32_t>{32}), 7);
}

TEST(PackIntegers, RefusesWrongSizes) {
  int32_t out[8];
  const std::vector<uint8_t> bytes = {0xFF, 0xFF, 0xFF};
  EXPECT_FALSE(UnpackIntegers(bytes, 0, 8, out).ok());
  EXPECT_FALSE(UnpackIntegers(bytes, 33, 1, out).ok());
  EXPECT_FALSE(UnpackIntegers(bytes, 3, 7, out).ok()) << "the three bits left over are not zero";
  EXPECT_FALSE(UnpackIntegers(bytes, 2, 8, out).ok()) << "a whole byte is left over";
  EXPECT_FALSE(UnpackIntegers(bytes, 8, 4, out).ok());
  EXPECT_TRUE(UnpackIntegers(bytes, 3, 8, out).ok());
}

}  // namespace
}  // namespace gradwire

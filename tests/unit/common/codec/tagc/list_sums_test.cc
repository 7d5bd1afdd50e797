// Sums of lists against plain ones: in cells of every width, with lists taken back, and with lists that are refused.
#include "common/codec/tagc/list_sums.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/codec/bits/index_code.h"
#include "common/codec/bits/integer_code.h"
#include "common/codec/plan/ranges.h"
#include "common/codec/tagc/list_segment.h"
#include "common/wire/frame.h"

namespace gradwire::tagc {
namespace {

using testing::ElementsAre;

using Values = std::map<uint32_t, int32_t>;  // by position
using Payload = std::vector<uint8_t>;

constexpr uint64_t kElements = 10'007;  // no multiple of a word or a block
constexpr uint32_t kIndexBlock = 4096;
constexpr int kCodingBits = 3;  // WIRE.md, kList

// Refers to itself: not copied.
struct Bucket {
  explicit Bucket(int cell_bytes, uint64_t elements = kElements, uint32_t index_block = kIndexBlock) {
    layout.elements = elements;
    shape.context.layout = &layout;
    shape.cell_bytes = cell_bytes;
    shape.limit = IntegerLimit(8 * cell_bytes, 1);
    shape.index_block = index_block;
  }
  Bucket(const Bucket&) = delete;

  BucketLayout layout;
  TagcShape shape;
};

struct List {
  Values values;
  std::vector<wire::Chunk> chunks;
};

List ListOf(const TagcShape& shape, Values values, uint64_t begin, uint64_t end) {
  std::vector<uint32_t> positions;
  std::vector<int32_t> integers;
  for (const auto& [position, integer] : values) {
    positions.push_back(position);
    integers.push_back(integer);
  }
  wire::FrameWriter writer({});
  AddLists(shape, positions, integers, begin, end, &writer);
  absl::StatusOr<std::vector<wire::Chunk>> chunks = wire::ParseFrame(writer.Finish());
  EXPECT_TRUE(chunks.ok()) << chunks.status();
  return {std::move(values), *std::move(chunks)};
}

List RandomList(const TagcShape& shape, std::mt19937& random) {
  uint32_t begin = 0, end = static_cast<uint32_t>(shape.elements());
  if (random() % 2 == 0) {
    begin = static_cast<uint32_t>(random() % shape.elements());
    end = begin + 1 + static_cast<uint32_t>(random() % (shape.elements() - begin));
  }
  constexpr uint32_t kPerMille[] = {1, 20, 400, 1000};  // each takes another coding
  const uint32_t density = kPerMille[random() % 4];
  const int32_t limit = random() % 3 == 0 ? 1 : shape.limit;
  std::uniform_int_distribution<int32_t> integer(-limit, limit);
  Values values;
  for (uint32_t p = begin; p < end; ++p)
    if (random() % 1000 < density) values[p] = integer(random);
  return ListOf(shape, std::move(values), begin, end);
}

void Add(ListSums& sums, const List& list) {
  for (const wire::Chunk& chunk : list.chunks)
    for (const wire::Segment& segment : chunk.segments) ASSERT_EQ(sums.Add(segment), absl::OkStatus());
}
void Remove(ListSums& sums, const List& list) {
  for (const wire::Chunk& chunk : list.chunks)
    for (const wire::Segment& segment : chunk.segments) sums.Remove(segment);
}

// Of a copy: to take them is to clear them.
Values NonZeros(ListSums sums) {
  std::vector<uint32_t> positions = {1, 2, 3};  // what was there is gone
  std::vector<int32_t> integers = {4};
  sums.Take(&positions, &integers);
  EXPECT_TRUE(sums.empty());
  EXPECT_EQ(positions.size(), integers.size());
  EXPECT_TRUE(std::is_sorted(positions.begin(), positions.end()));
  Values values;
  for (size_t i = 0; i < positions.size(); ++i) EXPECT_TRUE(values.emplace(positions[i], integers[i]).second);
  return values;
}

// What the lists add up to, modulo the width of a cell.
Values SumOf(const TagcShape& shape, const std::vector<List>& lists) {
  std::map<uint32_t, uint32_t> sums;
  for (const List& list : lists)
    for (const auto& [position, integer] : list.values) sums[position] += static_cast<uint32_t>(integer);
  const int unused = 32 - 8 * shape.cell_bytes;
  Values values;
  for (const auto& [position, sum] : sums)
    if (const int32_t cell = static_cast<int32_t>(sum << unused) >> unused; cell != 0) values[position] = cell;
  return values;
}

uint64_t EntriesOf(const std::vector<List>& lists) {
  uint64_t entries = 0;
  for (const List& list : lists) entries += list.values.size();
  return entries;
}

class EveryWidth : public testing::TestWithParam<int> {
 protected:
  Bucket bucket_{GetParam()};
  const TagcShape& shape_ = bucket_.shape;
  ListSums sums_{shape_};
};

TEST_P(EveryWidth, AreThoseOfPlainIntegers) {
  std::mt19937 random(5);
  for (int round = 0; round < 20; ++round) {
    SCOPED_TRACE(absl::StrCat("round ", round));
    std::vector<List> lists;
    for (int step = 0; step < 12; ++step) {
      if (!lists.empty() && random() % 3 == 0) {
        const auto which = lists.begin() + static_cast<ptrdiff_t>(random() % lists.size());
        Remove(sums_, *which);
        lists.erase(which);
      } else {
        lists.push_back(RandomList(shape_, random));
        Add(sums_, lists.back());
      }
      ASSERT_EQ(NonZeros(sums_), SumOf(shape_, lists));
      ASSERT_EQ(sums_.entries(), EntriesOf(lists));
      ASSERT_EQ(sums_.empty(), EntriesOf(lists) == 0);
    }
    if (round % 2 == 0) {
      std::vector<uint32_t> positions;
      std::vector<int32_t> integers;
      sums_.Take(&positions, &integers);
    } else {
      sums_.Clear();
    }
    ASSERT_TRUE(sums_.empty());
    ASSERT_EQ(NonZeros(sums_), Values());
  }
}

TEST_P(EveryWidth, OfBeforeAClearDoNotShow) {
  Add(sums_, ListOf(shape_, {{3, 1}, {64, -1}, {70, 1}, {10'006, 1}}, 0, kElements));
  sums_.Clear();
  Add(sums_, ListOf(shape_, {{3, 1}, {65, 1}, {70, 0}}, 0, kElements));
  EXPECT_EQ(NonZeros(sums_), (Values{{3, 1}, {65, 1}}));
  EXPECT_EQ(sums_.entries(), 3u);
  sums_.Clear();
  sums_.Clear();
  Add(sums_, ListOf(shape_, {{10'006, -1}}, 10'000, kElements));
  EXPECT_EQ(NonZeros(sums_), (Values{{10'006, -1}}));
}

TEST_P(EveryWidth, OfZeroAreNotListed) {
  const int32_t limit = shape_.limit;
  Add(sums_, ListOf(shape_, {{0, 1}, {63, limit}, {64, -limit}, {5000, limit}, {9000, 0}}, 0, kElements));
  Add(sums_, ListOf(shape_, {{0, 1}, {63, -limit}, {64, limit}, {5000, limit}}, 0, kElements));
  EXPECT_EQ(NonZeros(sums_), (Values{{0, 2}, {5000, -2}}));
  Add(sums_, ListOf(shape_, {{5000, 1}}, 5000, 5001));
  Add(sums_, ListOf(shape_, {{5000, 1}}, 5000, 5001));
  EXPECT_EQ(NonZeros(sums_), (Values{{0, 2}})) << "once around";
  EXPECT_EQ(sums_.entries(), 11u);
}

TEST_P(EveryWidth, TakeMemoryWithTheFirstPosition) {
  Add(sums_, ListOf(shape_, {}, 0, kElements));
  EXPECT_TRUE(sums_.empty());
  EXPECT_EQ(NonZeros(sums_), Values());
  EXPECT_EQ(sums_.memory_bytes(), 0u);
  Add(sums_, ListOf(shape_, {{9000, 1}}, 8192, kElements));
  EXPECT_FALSE(sums_.empty());
  EXPECT_EQ(sums_.memory_bytes(), ListSums::Bytes(shape_));
}

INSTANTIATE_TEST_SUITE_P(ListSums, EveryWidth, testing::Values(1, 2, 4),
                         [](const auto& info) { return absl::StrCat(8 * info.param, "Bits"); });

TEST(ListSums, OfSegmentsThatAreShorterOrLongerThanAWorkersOwn) {
  constexpr uint32_t kMany = 100'000;
  const Bucket bucket(2, kMany, 1u << 17);
  Values ones;
  for (uint32_t p = 0; p < kMany; ++p) ones[p] = 1;
  const List list = ListOf(bucket.shape, ones, 0, kMany);
  size_t segments = 0;
  for (const wire::Chunk& chunk : list.chunks) segments += chunk.segments.size();
  EXPECT_GT(segments, 1u) << "all in one would not fit a chunk";
  ListSums sums(bucket.shape);
  Add(sums, list);
  EXPECT_EQ(NonZeros(sums), ones);

  Payload payload = {0};  // no index bytes
  const CodedIntegers coded = EncodeIntegers(std::vector<int32_t>(kMany, -1));
  payload.insert(payload.end(), coded.payload.begin(), coded.payload.end());
  wire::Segment full;
  full.type = wire::SegmentType::kList;
  full.param = static_cast<uint8_t>(IndexCoding::kFull);
  full.count = kMany;
  full.bytes = static_cast<uint32_t>(payload.size());
  full.data = payload.data();
  ASSERT_EQ(sums.Add(full), absl::OkStatus());
  EXPECT_EQ(NonZeros(sums), Values());
  EXPECT_EQ(sums.entries(), 2 * kMany);
  Remove(sums, list);
  Values minus;
  for (uint32_t p = 0; p < kMany; ++p) minus[p] = -1;
  EXPECT_EQ(NonZeros(sums), minus);
}

// Segments that lists have, and what was done to them.
class RefusedLists : public testing::Test {
 protected:
  RefusedLists() { Add(sums_, ListOf(bucket_.shape, before_, 0, kElements)); }

  // Is refused by empty sums as by others, and changes neither.
  void ExpectRefused(const wire::SegmentHeader& header, const Payload& payload, const std::string& how) {
    SCOPED_TRACE(how);
    wire::Segment segment{header};
    segment.bytes = static_cast<uint32_t>(payload.size());
    segment.data = payload.data();
    EXPECT_EQ(sums_.Add(segment).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(NonZeros(sums_), before_);
    EXPECT_EQ(sums_.entries(), before_.size());
    ListSums none(bucket_.shape);
    EXPECT_EQ(none.Add(segment).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(none.empty());
    EXPECT_EQ(none.memory_bytes(), 0u);
  }

  // One of kIndexBlock elements from 0, of 8 bits each.
  static wire::SegmentHeader HeaderOf(IndexCoding coding, int bits = 8) {
    return {wire::SegmentType::kList, static_cast<uint8_t>(static_cast<int>(coding) | (bits - 1) << kCodingBits), 0,
            kIndexBlock};
  }
  static Payload PayloadOf(const std::vector<uint16_t>& coordinates, const std::vector<int32_t>& integers,
                           int bits = 8) {
    const size_t index_bytes = coordinates.size() * sizeof(uint16_t);
    Payload payload;
    PutNumber(index_bytes, &payload);
    payload.resize(payload.size() + index_bytes);
    if (!coordinates.empty())
      std::memcpy(payload.data() + payload.size() - index_bytes, coordinates.data(), index_bytes);
    const Payload packed = PackIntegers(integers, bits);
    payload.push_back(0);  // the least code
    payload.insert(payload.end(), packed.begin(), packed.end());
    payload.push_back(0);  // no sets
    return payload;
  }

  Bucket bucket_{1};
  ListSums sums_{bucket_.shape};
  const Values before_ = {{0, 5}, {1000, -7}, {5000, 100}};
};

TEST_F(RefusedLists, OfEveryCodingThatAreCutOrHaveOtherIndexBytes) {
  std::vector<int> codings;
  const auto spoil = [&](const Values& values) {
    const List list = ListOf(bucket_.shape, values, kIndexBlock, 2 * kIndexBlock);
    const wire::Segment& whole = list.chunks[0].segments[0];
    const Payload payload(whole.payload().begin(), whole.payload().end());
    codings.push_back(whole.param & ((1 << kCodingBits) - 1));
    for (size_t bytes = 0; bytes < payload.size(); ++bytes)
      ExpectRefused(whole, Payload(payload.begin(), payload.begin() + static_cast<ptrdiff_t>(bytes)),
                    absl::StrCat("coding ", codings.back(), " cut to ", bytes, " of ", payload.size(), " bytes"));
    Payload longer = payload;
    longer.push_back(0);
    ExpectRefused(whole, longer, absl::StrCat("coding ", codings.back(), ", one byte too many"));
    for (int64_t by : {-2, -1, 1, 2, 1 << 20, -1 << 30}) {
      std::span<const uint8_t> rest = payload;
      uint64_t index_bytes = 0;
      ASSERT_TRUE(TakeNumber(&rest, &index_bytes));
      Payload other;
      PutNumber(index_bytes + static_cast<uint64_t>(by), &other);
      other.insert(other.end(), rest.begin(), rest.end());
      ExpectRefused(whole, other, absl::StrCat("coding ", codings.back(), ", index bytes other by ", by));
    }
  };
  const auto every = [](uint32_t step) {
    Values values;
    for (uint32_t p = kIndexBlock; p < 2 * kIndexBlock; p += step) values[p] = static_cast<int32_t>(p % 100) + 1;
    return values;
  };
  spoil({{5000, 9}});
  spoil(every(100));
  spoil(every(2));
  spoil(every(1));
  Values rows;
  for (uint32_t p = kIndexBlock; p < 2 * kIndexBlock; ++p) {
    if (p % 640 < 64) rows[p] = static_cast<int32_t>(p % 100) + 1;
  }
  spoil(rows);
  EXPECT_THAT(codings, ElementsAre(static_cast<int>(IndexCoding::kCoordinates), static_cast<int>(IndexCoding::kRice),
                                   static_cast<int>(IndexCoding::kBitmap), static_cast<int>(IndexCoding::kFull),
                                   static_cast<int>(IndexCoding::kStretches)));
}

TEST_F(RefusedLists, WithPositionsThatAreNotAscendingOrOutside) {
  const wire::SegmentHeader header = HeaderOf(IndexCoding::kCoordinates);
  ExpectRefused(header, PayloadOf({3, 5, 4}, {1, 2, 3}), "not ascending");
  ExpectRefused(header, PayloadOf({3, 5, 5}, {1, 2, 3}), "one twice");
  ExpectRefused(header, PayloadOf({3, 5, kIndexBlock}, {1, 2, 3}), "behind the last");
  ExpectRefused(header, PayloadOf({}, {}), "none");
  wire::SegmentHeader past = header;
  past.begin = (uint64_t{1} << 32) - kIndexBlock + 1;
  ExpectRefused(past, PayloadOf({3, 5, 6}, {1, 2, 3}), "past 2^32");
  wire::Segment good{header};
  const Payload payload = PayloadOf({3, 5, 6}, {1, 2, 3});
  good.bytes = static_cast<uint32_t>(payload.size());
  good.data = payload.data();
  EXPECT_EQ(sums_.Add(good), absl::OkStatus()) << "what was spoilt above";
}

TEST_F(RefusedLists, WithIntegersThatNoWorkerHas) {
  const wire::SegmentHeader header = HeaderOf(IndexCoding::kCoordinates);
  EXPECT_EQ(bucket_.shape.limit, 127);
  ExpectRefused(header, PayloadOf({3, 5, 6}, {1, 2, -128}), "below the limit");
  ExpectRefused(HeaderOf(IndexCoding::kCoordinates, 9), PayloadOf({3, 5, 6}, {1, 2, 128}, 9), "above the limit");
  ExpectRefused(HeaderOf(IndexCoding::kCoordinates, 4), PayloadOf({3, 5, 6}, {1, 2, 3}), "in fewer bits");
  ExpectRefused(HeaderOf(IndexCoding::kCoordinates, 16), PayloadOf({3, 5, 6}, {1, 2, 3}), "in more bits");
  ExpectRefused(header, PayloadOf({3, 5, 6}, {1, 2}), "one too few");
}

TEST_F(RefusedLists, WithAnIndexThatIsNoneOrUnknown) {
  ExpectRefused(HeaderOf(IndexCoding::kEmpty), PayloadOf({}, {1}), "integers without positions");
  ExpectRefused(HeaderOf(IndexCoding::kEmpty, 2), {}, "an empty one that has bits");
  ExpectRefused(HeaderOf(IndexCoding::kFull), {}, "a full one without integers");
  ExpectRefused(HeaderOf(static_cast<IndexCoding>(7)), PayloadOf({3}, {1}), "unknown");
}

}  // namespace
}  // namespace gradwire::tagc

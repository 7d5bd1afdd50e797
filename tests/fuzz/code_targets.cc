// Index codes, packed integers, values of runs and plans: the parts of frames that are decoded by themselves.
#include <algorithm>
#include <bit>
#include <cstring>

#include "common/codec/bits/index_code.h"
#include "common/codec/bits/integer_code.h"
#include "common/codec/bits/run_values.h"
#include "common/codec/plan/plan_check.h"
#include "tests/fuzz/buckets.h"
#include "tests/fuzz/targets.h"

namespace gradwire::fuzz {
namespace {

constexpr uint32_t kMaxPositions = 1 << 16;  // of an index: its callers bound it by their bucket

template <typename T>
void Append(T value, std::vector<uint8_t>* out) {
  for (size_t i = 0; i < sizeof(T); ++i) out->push_back(static_cast<uint8_t>(value >> (8 * i)));
}

void RequireIndexRoundTrip(const std::vector<uint32_t>& positions, uint32_t begin, uint32_t count) {
  for (IndexForm form : {IndexForm::kSmallest, IndexForm::kAuto, IndexForm::kCoordinates, IndexForm::kBitmap}) {
    const CodedIndex coded = EncodeIndex(positions, begin, count, form);
    std::vector<uint32_t> again;
    Require(DecodeIndex(coded.coding, coded.payload, begin, count, &again).ok() && again == positions,
            "an index that is encoded and decoded keeps its positions");
  }
}

}  // namespace

// u8 coding, u32 begin, u32 count, payload. The payload also serves as gaps of an index to be encoded.
void RunIndex(Input input) {
  Reader reader(input);
  const uint8_t coding = reader.Take<uint8_t>();
  const uint32_t begin = reader.Take<uint32_t>();
  const uint32_t count = reader.Take<uint32_t>() % (kMaxPositions + 1);
  std::vector<uint32_t> positions = {7};  // what is there already stays
  const absl::Status status = DecodeIndex(static_cast<IndexCoding>(coding), reader.rest(), begin, count, &positions);
  Require(positions[0] == 7, "decoding appends");
  positions.erase(positions.begin());
  if (status.ok()) {
    Require(std::ranges::adjacent_find(positions, std::greater_equal<>()) == positions.end(), "positions ascend");
    Require(positions.empty() || (positions.front() >= begin && positions.back() - begin < count),
            "positions lie within the segment");
    RequireIndexRoundTrip(positions, begin, count);
  }
  positions.clear();
  uint64_t next = begin;
  for (const uint64_t end = std::min(uint64_t{begin} + count, uint64_t{1} << 32); uint8_t gap : reader.rest()) {
    next += gap < 128 ? gap : (gap - 127) * 257;
    if (next >= end) break;
    positions.push_back(static_cast<uint32_t>(next++));
  }
  if (uint64_t{begin} + count <= uint64_t{1} << 32) RequireIndexRoundTrip(positions, begin, count);
}

Seeds IndexSeeds() {
  Seeds seeds;
  const auto add = [&seeds](IndexCoding coding, uint32_t begin, uint32_t count, std::span<const uint8_t> payload) {
    std::vector<uint8_t> seed = {static_cast<uint8_t>(coding)};
    Append(begin, &seed);
    Append(count, &seed);
    seed.insert(seed.end(), payload.begin(), payload.end());
    seeds.push_back(std::move(seed));
  };
  add(IndexCoding::kEmpty, 5, 100, {});
  add(IndexCoding::kFull, 5, 100, {});
  for (uint32_t step : {2u, 10u, 300u, 9000u}) {
    std::vector<uint32_t> positions;
    for (uint32_t p = 1000; p < 1000 + kMaxPositions && positions.size() < 200; p += 1 + p % step) {
      positions.push_back(p);
    }
    const uint32_t count = positions.back() - 1000 + 1;
    const CodedIndex coded = EncodeIndex(positions, 1000, count);
    add(coded.coding, 1000, count, coded.payload);
    const CodedIndex wide = EncodeIndex(positions, 1000, count, IndexForm::kCoordinates);
    add(wide.coding, 1000, count, wide.payload);
  }
  for (uint32_t length : {2u, 16u, 64u}) {  // stretches
    std::vector<uint32_t> positions;
    for (uint32_t p = 1000; p < 1000 + kMaxPositions / 4; p += 7 * length + p % 5) {
      for (uint32_t i = 0; i < length + p % 2; ++i) positions.push_back(p + i);
    }
    const CodedIndex coded = EncodeIndex(positions, 1000, kMaxPositions);
    add(coded.coding, 1000, kMaxPositions, coded.payload);
  }
  return seeds;
}

// u8 coding, u16 number of runs, payload, which also serves as values to be encoded.
void RunRunValues(Input input) {
  Reader reader(input);
  const RunCoding coding = static_cast<RunCoding>(reader.Take<uint8_t>());
  const uint32_t count = reader.Take<uint16_t>();
  const auto require_round_trip = [](const std::vector<int8_t>& values) {
    const CodedRuns coded = EncodeRuns(values);
    Require(coded.payload.size() <= values.size(), "values of runs never take more than a byte each");
    std::vector<int8_t> again;
    Require(
        DecodeRuns(coded.coding, coded.payload, static_cast<uint32_t>(values.size()), &again).ok() && again == values,
        "values of runs that are encoded and decoded stay the same");
  };
  std::vector<int8_t> values = {7};
  const bool decoded = DecodeRuns(coding, reader.rest(), count, &values).ok();
  Require(values.size() == (decoded ? count : 0), "as many values as runs, or none");
  if (decoded) require_round_trip(values);
  require_round_trip({reader.rest().begin(), reader.rest().end()});
}

Seeds RunValueSeeds() {
  Seeds seeds;
  for (int step : {0, 1, 5, 100}) {
    std::vector<int8_t> values;
    for (int i = 0; i < 40; ++i) values.push_back(static_cast<int8_t>(-20 + (i / 4) % 2 * step));
    const CodedRuns coded = EncodeRuns(values);
    seeds.push_back({static_cast<uint8_t>(coded.coding)});
    Append(static_cast<uint16_t>(values.size()), &seeds.back());
    seeds.back().insert(seeds.back().end(), coded.payload.begin(), coded.payload.end());
  }
  return seeds;
}

void RunCodedIntegers(Input payload, int bits, std::vector<int32_t> values) {
  if (!DecodeIntegers(payload, bits, values.size(), values.data()).ok() || values.empty()) return;
  const CodedIntegers coded = EncodeIntegers(values);
  std::vector<int32_t> again(values.size());
  Require(DecodeIntegers(coded.payload, coded.bits, again.size(), again.data()).ok() && again == values,
          "integers that are encoded and decoded keep their values");
}

// i8 bits, below 0 those of coded integers; u16 number of integers, payload.
void RunIntegers(Input input) {
  Reader reader(input);
  const int bits = static_cast<int8_t>(reader.Take<uint8_t>());
  std::vector<int32_t> values(reader.Take<uint16_t>());
  if (bits < 0) return RunCodedIntegers(reader.rest(), -bits, std::move(values));
  if (!UnpackIntegers(reader.rest(), bits, values.size(), values.data()).ok()) return;
  Require(std::ranges::equal(PackIntegers(values, bits), reader.rest()), "packed integers have one form");
  const int least = BitsFor(values);
  Require(least <= bits, "as many bits as needed");
  std::vector<int32_t> again(values.size());
  Require(UnpackIntegers(PackIntegers(values, least), least, again.size(), again.data()).ok() && again == values,
          "integers that are packed and unpacked keep their values");
}

Seeds IntegerSeeds() {
  Seeds seeds;
  for (int bits : {1, 3, 8, 17, 32}) {
    std::vector<int32_t> values;
    const int32_t top = static_cast<int32_t>((uint32_t{1} << (bits - 1)) - 1);
    for (int i = 0; i < 21; ++i) values.push_back(i % 3 == 0 ? top / 2 : i % 3 == 1 ? -top / 2 : 0);
    seeds.push_back({static_cast<uint8_t>(bits)});
    Append(static_cast<uint16_t>(values.size()), &seeds.back());
    const std::vector<uint8_t> packed = PackIntegers(values, bits);
    seeds.back().insert(seeds.back().end(), packed.begin(), packed.end());
  }
  for (const int32_t most : {1, 2, 40}) {
    std::vector<int32_t> values;
    for (int i = 0; i < 60; ++i) values.push_back((i % 2 == 0 ? 1 : -1) * (1 + (i % 7 == 0 ? i % most : 0)));
    const CodedIntegers coded = EncodeIntegers(values);
    seeds.push_back({static_cast<uint8_t>(-coded.bits)});
    Append(static_cast<uint16_t>(values.size()), &seeds.back());
    seeds.back().insert(seeds.back().end(), coded.payload.begin(), coded.payload.end());
  }
  return seeds;
}

// u8 bucket, u8 round, u32 sketch groups, u32 cells per group, exponents or factors. A plan that the check accepts can
// be opened and encoded by, and the accumulator then takes the frame.
void RunPlan(Input input) {
  Reader reader(input);
  const Bucket& bucket = BucketOf(reader.Take<uint8_t>());
  const testing::Cluster& cluster = *bucket.cluster;
  const uint64_t round = reader.Take<uint8_t>();
  RoundPlan plan;
  plan.sketch_groups = reader.Take<uint32_t>();
  plan.cells_per_group = reader.Take<uint32_t>();
  if (cluster.job().two_phase()) {
    plan.factors.resize(reader.rest().size() / sizeof(float));
    if (!plan.factors.empty()) std::memcpy(plan.factors.data(), reader.rest().data(), 4 * plan.factors.size());
  } else {
    plan.exponents.assign(reader.rest().begin(), reader.rest().end());
  }
  if (!CheckPlan(cluster.job(), cluster.layout(), round, plan).ok()) return;
  const std::unique_ptr<Accumulator> accumulator = cluster.codec().NewAccumulator();
  accumulator->Open(round, plan);
  const absl::StatusOr<EncodedFrame> frame = EncodeBy(bucket, round, plan);
  if (!frame.ok()) return;
  const testing::ParsedFrame parsed = testing::ParseAll(*frame);
  for (const wire::Segment& s : parsed.segments) {
    if (s.type == wire::SegmentType::kLearningRates) continue;
    Require(accumulator->Add(s).ok(), "a frame that was encoded by a plan is merged by it");
  }
  const absl::StatusOr<UpdateFrame> update = accumulator->Finish(IdentityOf(bucket, round, 0), 1);
  Require(update.ok() && CheckPlan(cluster.job(), cluster.layout(), round + 1, update->next).ok(),
          "a good plan follows");
}

Seeds PlanSeeds() {
  Seeds seeds;
  for (uint8_t b = 0; b < BucketCount(); ++b) {
    for (const Round& round : Buckets()[b].rounds) {
      seeds.push_back({b, static_cast<uint8_t>(round.round)});
      Append(round.plan.sketch_groups, &seeds.back());
      Append(round.plan.cells_per_group, &seeds.back());
      seeds.back().insert(seeds.back().end(), round.plan.exponents.begin(), round.plan.exponents.end());
      for (const float factor : round.plan.factors) Append(std::bit_cast<uint32_t>(factor), &seeds.back());
    }
  }
  return seeds;
}

}  // namespace gradwire::fuzz

// DecodeParameters: what it accepts is finite and complete, and survives being encoded again.
#include <algorithm>
#include <cmath>

#include "common/codec/frame/parameters.h"
#include "common/codec/plan/plan_check.h"
#include "tests/fuzz/buckets.h"
#include "tests/fuzz/chunk_input.h"
#include "tests/fuzz/targets.h"

namespace gradwire::fuzz {
namespace {

// Memory for all arrays. NaN until it is written.
struct Arrays {
  explicit Arrays(size_t elements)
      : parameter(elements, NAN), first_moment(elements, NAN), second_moment(elements, NAN) {}
  std::vector<float> parameter, first_moment, second_moment;
  // Which are asked for: bit 0 the parameters, bit 1 and 2 the moments.
  ParameterTargets Targets(uint8_t wanted) {
    return {(wanted & 1) != 0 ? parameter.data() : nullptr, (wanted & 2) != 0 ? first_moment.data() : nullptr,
            (wanted & 4) != 0 ? second_moment.data() : nullptr};
  }
};

bool Finite(const float* values, size_t n) {
  return values == nullptr || std::all_of(values, values + n, [](float v) { return std::isfinite(v); });
}

}  // namespace

void RunParameters(Input bytes) {
  const ChunkInput input = ParseInput(bytes);
  const Bucket& bucket = BucketOf(input.bucket);
  const testing::Cluster& cluster = *bucket.cluster;
  const BucketLayout& layout = cluster.layout();
  const uint64_t version = input.round % 3;
  std::vector<Bytes> chunks;
  for (const std::vector<uint8_t>& chunk : input.chunks) chunks.push_back(Slices(chunk, 0)[0]);
  Arrays arrays(layout.elements);
  const ParameterTargets targets = arrays.Targets(input.slicing % 8);
  const absl::StatusOr<PlanWindow> plans = DecodeParameters(chunks, cluster.job(), layout, version, targets);
  if (!plans.ok()) return;
  for (const float* array : {targets.parameter, targets.first_moment, targets.second_moment}) {
    Require(Finite(array, layout.elements), "all elements of the arrays asked for are there, and finite");
  }
  if (plans->newest_first().empty()) return;  // kInitialize
  (void)EncodeBy(bucket, version + 1, plans->newest());
  if (targets.parameter == nullptr) return;
  const std::vector<Bytes> again = EncodeParameters(layout, *plans, ParameterContent::kState,
                                                    {targets.parameter, targets.first_moment, targets.second_moment});
  Arrays copy(layout.elements);
  const absl::StatusOr<PlanWindow> same =
      DecodeParameters(again, cluster.job(), layout, version, copy.Targets(input.slicing % 8));
  Require(same.ok() && *same == *plans && copy.parameter == arrays.parameter, "decode(encode(x)) == x");
}

Seeds ParameterSeeds() {
  Seeds seeds;
  for (uint8_t b = 0; b < BucketCount(); ++b) {
    const BucketLayout& layout = Buckets()[b].cluster->layout();
    const std::vector<float> values(layout.elements, 0.25f);
    seeds.push_back(MakeInput(b, 0, 1, EncodeInitialize(layout, 1, values.data())));
    const RoundPlan& plan = Buckets()[b].rounds[0].next;
    const ParameterArrays arrays{values.data(), values.data(), values.data()};
    for (const auto content : {ParameterContent::kFloat32, ParameterContent::kBf16, ParameterContent::kState}) {
      const uint8_t wanted = content == ParameterContent::kState ? 7 : 1;
      seeds.push_back(MakeInput(b, 1, wanted, EncodeParameters(layout, PlanWindow(1, 1, {plan}), content, arrays)));
    }
  }
  return seeds;
}

}  // namespace gradwire::fuzz

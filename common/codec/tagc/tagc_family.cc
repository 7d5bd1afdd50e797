// TAGC as a kind of codec: plans with a sketch, updates of positions and integers, and what it is in words.
#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/bits/index_code.h"
#include "common/codec/tagc/geometry.h"
#include "common/codec/tagc/list_segment.h"
#include "common/codec/tagc/tagc_codec.h"

namespace gradwire::tagc {
namespace {

using wire::Segment;
using wire::SegmentType;

constexpr double kPeelingLoad = 0.74;  // non-zeros per cell that a sketch still decodes

Explanation Explain(const TagcSpec& spec, uint64_t elements) {
  Explanation e;
  e.text += absl::StrFormat(
      "  density=%g  of each tensor, the largest %g %% of the elements are sent; the others wait in "
      "the residual\n",
      spec.density, 100 * spec.density);
  e.text +=
      spec.cell_bits == 0
          ? "  cells=auto    bits that an integer of the sums has, chosen by bits and the job's max_workers so that it "
            "cannot overflow\n"
          : absl::StrFormat("  cells=%d      bits that an integer of the sums has; more workers need more\n",
                            spec.cell_bits);
  e.text += spec.bits == 0
                ? absl::StrFormat(
                      "  bits=auto     bits of an integer that a worker sends, at most: %s; the rest waits in "
                      "the residual\n",
                      spec.cell_bits == 0 ? absl::StrCat(TagcSpec::kAutoBits) : "as many as cells allow")
                : absl::StrFormat(
                      "  bits=%d        bits of an integer that a worker sends, at most; the rest "
                      "waits in the residual\n",
                      spec.bits);
  const bool sketch = spec.form == TagcSpec::Form::kSketch;
  e.text += sketch ? "  form=sketch   an index and a sketch, which can be merged undecoded; it grows with the workers\n"
                   : absl::StrFormat("  form=%s     positions and integers, as many however many workers there are\n",
                                     spec.form == TagcSpec::Form::kList ? "list" : "auto");
  e.text += spec.warmup_rounds == 0
                ? "  warmup_rounds=0  the density is the same from the first round on\n"
                : absl::StrFormat("  warmup_rounds=%d  the density falls from %g to %g over so many rounds\n",
                                  spec.warmup_rounds, spec.warmup_density, spec.density);
  e.text += absl::StrFormat(
      "  slack=%g      cells of a sketch relative to what decoding needs; below 1, its elements are deferred a round\n",
      spec.slack);
  const double chosen = spec.density * static_cast<double>(elements);
  const double p = spec.density;
  const double entropy_bits =
      p >= 1 ? 0 : static_cast<double>(elements) * -(p * std::log2(p) + (1 - p) * std::log2(1 - p));
  const double cell_bits = spec.cell_bits != 0 ? spec.cell_bits : spec.bits > 8 ? 16 : 8;  // of few workers
  const uint32_t bits = spec.bits != 0 ? spec.bits : spec.cell_bits != 0 ? spec.cell_bits : TagcSpec::kAutoBits;
  // None is 0, so that two bits, which hold a sign, take one.
  const double most_bits = std::bit_width((uint64_t{1} << bits) - 3);
  const double value_bits = std::min(most_bits, cell_bits);
  e.push_bytes = entropy_bits / 8 + chosen * (sketch ? spec.slack / kPeelingLoad * cell_bits : value_bits) / 8;
  e.text += sketch ? "  Workers' frames are merged without decoding them; what cannot be decoded is deferred, never "
                     "estimated.\n"
                   : "  Workers' lists are added as integers; nothing is deferred.\n";
  return e;
}

// Lists of sums; in journals of older builds positions, then the sums there.
class SumReader final : public BodyReader {
 public:
  absl::Status Read(const Segment& s, const Bytes&, BodyBuilder* body) override {
    if (s.type != SegmentType::kList && s.type != SegmentType::kIndex && s.type != SegmentType::kValues)
      return NotOfAnUpdate(s);
    Update& update = body->update();
    GW_RETURN_IF_ERROR(body->Begin(Update::Body::kSparse));
    if (s.type == SegmentType::kIndex) return body->AppendPositions(s, &update.positions);
    const size_t before = update.integers.size();
    if (s.type == SegmentType::kList) {
      if (before != update.positions.size()) return absl::InvalidArgumentError("positions without sums before a list");
      GW_RETURN_IF_ERROR(body->CheckPositions(s, update.positions));
      return ReadList(s, {}, &update.positions, &update.integers, &scratch_);
    }
    if (before + s.count != update.positions.size()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%d values for %d positions", before + s.count, update.positions.size()));
    }
    update.integers.resize(before + s.count);
    return UnpackIntegers(s.payload(), s.param, s.count, update.integers.data() + before);
  }

 private:
  IntegerScratch scratch_;
};

class TagcFamily final : public CodecFamily {
 public:
  absl::StatusOr<std::unique_ptr<Codec>> Make(const CodecContext& context, const CodecSpec& spec) const override {
    return MakeTagcCodec(context, std::get<TagcSpec>(spec));
  }
  Explanation Explain(const CodecSpec& spec, uint64_t elements) const override {
    return tagc::Explain(std::get<TagcSpec>(spec), elements);
  }
  TrainingDefaults Training(const CodecSpec&) const override { return {.push_steps = true, .small_dense = true}; }

  bool PlansExponents(const CodecSpec&) const override { return true; }
  absl::Status CheckSketch(const Job& job, const BucketLayout& slice, const RoundPlan& plan) const override {
    return CheckGeometry({plan.sketch_groups, plan.cells_per_group}, LimitsOf(job, slice));
  }
  void ReshardSketch(const Job& job, const BucketLayout& to, std::span<const PlanPart> from,
                     RoundPlan* plan) const override {
    if (to.elements == 0) return;
    const double slack = SpecOf(job, to).slack;
    double capacity = 0;
    double elements = 0;
    for (const PlanPart& part : from) {
      if (part.layout->elements == 0) continue;
      if (part.plan.sketch_groups == 0) return;
      capacity += CapacityOf({part.plan.sketch_groups, part.plan.cells_per_group}, slack);
      elements += static_cast<double>(part.layout->elements);
    }
    const Geometry geometry =
        ShareOfGeometry(capacity, static_cast<double>(to.elements) / elements, slack, LimitsOf(job, to));
    plan->sketch_groups = geometry.groups;
    plan->cells_per_group = geometry.cells_per_group;
  }

  std::unique_ptr<BodyReader> NewSumReader(const Job&, const BucketLayout&) const override {
    return std::make_unique<SumReader>();
  }

 private:
  static const TagcSpec& SpecOf(const Job& job, const BucketLayout& slice) {
    return std::get<TagcSpec>(job.codecs()[slice.codec]);
  }
  static GeometryLimits LimitsOf(const Job& job, const BucketLayout& slice) {
    return LimitsFor(SpecOf(job, slice), slice.elements, job.spec().max_workers());
  }
};

}  // namespace

const CodecFamily& Family() {
  static const TagcFamily family;
  return family;
}

}  // namespace gradwire::tagc

// PowerSGD as a kind of codec: plans of factors, updates of factors, and what it is in words.
#include <algorithm>
#include <cmath>
#include <memory>

#include "absl/strings/str_format.h"
#include "common/codec/plan/factor_segments.h"
#include "common/codec/powersgd/factor_frames.h"
#include "common/codec/powersgd/matrices.h"
#include "common/codec/powersgd/powersgd_codec.h"

namespace gradwire::powersgd {
namespace {

using wire::Segment;
using wire::SegmentType;

Explanation Explain(const PowerSgdSpec& spec, uint64_t elements) {
  const double side = std::sqrt(static_cast<double>(elements));
  return {
      absl::StrFormat("  rank=%d  a matrix travels as two factors of so many columns, summed over the workers in two "
                      "rounds, the second of which starts from the mean of the first; the rest goes to the residual. "
                      "Vectors, and matrices that it would not make smaller, travel as they are. A tensor lies on one "
                      "shard as a whole. Bytes below are for a square matrix\n",
                      spec.rank),
      4 * std::min(2 * side * spec.rank, static_cast<double>(elements))};
}

class FactorReader final : public BodyReader {
 public:
  FactorReader(const Job& job, const BucketLayout& slice) : matrices_(MatricesOf(job, slice)) {}

  absl::Status Read(const Segment& s, const Bytes&, BodyBuilder* body) override {
    if (s.type != SegmentType::kFactors) return NotOfAnUpdate(s);
    Update& update = body->update();
    return ReadFactors(s, SizeOf(matrices_, FactorSentIn(update.round)), &update.next.factors);
  }
  absl::Status Finish(const RoundPlan& plan, BodyBuilder* body) override {
    return FinishUpdate(matrices_, plan.factors, body->layout(), &body->update());
  }

 private:
  const std::vector<Matrix> matrices_;
};

class PowerSgdFamily final : public CodecFamily {
 public:
  absl::StatusOr<std::unique_ptr<Codec>> Make(const CodecContext& context, const CodecSpec&) const override {
    return MakePowerSgdCodec(context);
  }
  Explanation Explain(const CodecSpec& spec, uint64_t elements) const override {
    return powersgd::Explain(std::get<PowerSgdSpec>(spec), elements);
  }
  TrainingDefaults Training(const CodecSpec&) const override { return {.push_steps = true}; }

  uint64_t FactorsAt(const Job& job, const BucketLayout& slice, uint64_t version) const override {
    return SizeOf(MatricesOf(job, slice), FactorPlannedAt(version));
  }
  uint64_t MostFactors(const Job& job, const BucketLayout& slice) const override {
    const std::vector<Matrix> matrices = MatricesOf(job, slice);
    return std::max(SizeOf(matrices, Factor::kP), SizeOf(matrices, Factor::kQ));
  }
  void MoveFactors(const Job& job, const BucketLayout& from, const RoundPlan& plan, uint64_t version,
                   const BucketLayout& to, RoundPlan* target) const override {
    const std::vector<Matrix> targets = MatricesOf(job, to);
    const Factor factor = FactorPlannedAt(version);
    target->factors.resize(SizeOf(targets, factor));
    CopyFactors(MatricesOf(job, from), plan.factors, targets, factor, target->factors);
  }

  std::unique_ptr<BodyReader> NewSumReader(const Job& job, const BucketLayout& slice) const override {
    return std::make_unique<FactorReader>(job, slice);
  }
};

}  // namespace

const CodecFamily& Family() {
  static const PowerSgdFamily family;
  return family;
}

}  // namespace gradwire::powersgd

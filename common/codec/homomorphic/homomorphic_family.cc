// The homomorphic codecs as a kind: plans with ranges, updates of sums of levels, and what they are in words.
#include <cmath>
#include <memory>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/homomorphic/homomorphic_codec.h"

namespace gradwire::homomorphic {
namespace {

using wire::Segment;
using wire::SegmentType;

Explanation Explain(const HomomorphicSpec& spec, uint64_t elements) {
  const double n = static_cast<double>(elements);
  constexpr char kMerged[] =
      "  Workers agree on the range of each run a round ahead, so that frames are merged as integers.\n";
  const double bytes = n * spec.bits / 8 + std::ceil(n / 4096);  // and a range per run
  if (spec.scheme == HomomorphicSpec::Scheme::kThc) {
    return {absl::StrFormat("  bits=%d  each run is rotated at random, and each number becomes one of %d table values "
                            "from 0 to %d, by chance; the range leaves out %g %% of normal numbers; the rest goes to "
                            "the residual\n%s",
                            spec.bits, 1 << spec.bits, spec.granularity, 100 * spec.p, kMerged),
            bytes};
  }
  const bool nearest = spec.rounding == HomomorphicSpec::Rounding::kNearest;
  return {absl::StrFormat("  bits=%d  each element becomes one of %d even levels of its run's range, %s\n%s", spec.bits,
                          (1 << spec.bits) - 1,
                          nearest ? "the nearest; the rest goes to the residual"
                                  : "by chance; unbiased, and what lies beyond the range goes to the residual",
                          kMerged),
          bytes};
}

class LevelReader final : public BodyReader {
 public:
  LevelReader(const Job& job, const BucketLayout& slice, const HomomorphicSpec& spec) : means_(&job, &slice, spec) {}

  absl::Status Read(const Segment& s, const Bytes&, BodyBuilder* body) override {
    if (s.type != SegmentType::kLevelSums) return NotOfAnUpdate(s);
    const Update& update = body->update();
    if (update.exponents.size() != body->layout().runs.size()) return MissingExponents(update);
    GW_RETURN_IF_ERROR(body->Begin(Update::Body::kDenseFloat));
    GW_RETURN_IF_ERROR(body->Advance(s));
    return means_.Read(s, update.round, update.exponents, update.contributors, body->NewPart(s));
  }

 private:
  MeansReader means_;
};

class HomomorphicFamily final : public CodecFamily {
 public:
  absl::StatusOr<std::unique_ptr<Codec>> Make(const CodecContext& context, const CodecSpec& spec) const override {
    return MakeHomomorphicCodec(context, std::get<HomomorphicSpec>(spec));
  }
  Explanation Explain(const CodecSpec& spec, uint64_t elements) const override {
    return homomorphic::Explain(std::get<HomomorphicSpec>(spec), elements);
  }
  bool PlansExponents(const CodecSpec&) const override { return true; }
  std::unique_ptr<BodyReader> NewSumReader(const Job& job, const BucketLayout& slice) const override {
    return std::make_unique<LevelReader>(job, slice, std::get<HomomorphicSpec>(job.codecs()[slice.codec]));
  }
};

}  // namespace

const CodecFamily& Family() {
  static const HomomorphicFamily family;
  return family;
}

}  // namespace gradwire::homomorphic

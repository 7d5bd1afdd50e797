// What kinds of codecs do unless they know better; see family.h.
#include "common/codec/family.h"

namespace gradwire {

TrainingDefaults CodecFamily::Training(const CodecSpec&) const { return {}; }

bool CodecFamily::PlansExponents(const CodecSpec&) const { return false; }
uint64_t CodecFamily::FactorsAt(const Job&, const BucketLayout&, uint64_t) const { return 0; }
uint64_t CodecFamily::MostFactors(const Job&, const BucketLayout&) const { return 0; }

absl::Status CodecFamily::CheckSketch(const Job&, const BucketLayout&, const RoundPlan&) const {
  return absl::InvalidArgumentError("its codec has no sketch");
}

void CodecFamily::ReshardSketch(const Job&, const BucketLayout&, std::span<const PlanPart>, RoundPlan*) const {}
void CodecFamily::MoveFactors(const Job&, const BucketLayout&, const RoundPlan&, uint64_t, const BucketLayout&,
                              RoundPlan*) const {}

std::unique_ptr<BodyReader> CodecFamily::NewSumReader(const Job&, const BucketLayout&) const {
  return std::make_unique<BodyReader>();
}

wire::SegmentType CodecFamily::CompressedType(const CodecSpec&) const { return wire::SegmentType::kDenseF32; }

std::unique_ptr<BodyReader> CodecFamily::NewCompressedReader(const Job&, const BucketLayout&, const CodecSpec&) const {
  return std::make_unique<BodyReader>();
}

}  // namespace gradwire

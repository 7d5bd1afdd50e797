// The quantizers as a kind of codec: updates that are compressed by one, and what they are in words.
#include <cmath>
#include <memory>
#include <string>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/quantized/quantized_codec.h"
#include "common/codec/quantized/quantized_shape.h"

namespace gradwire::quantized {
namespace {

using wire::Segment;
using wire::SegmentType;

Explanation Explain(const QuantizedSpec& spec, uint64_t elements) {
  using Scheme = QuantizedSpec::Scheme;
  constexpr double kRun = 4096;  // elements that share a scale, unless the job says otherwise
  const double n = static_cast<double>(elements);
  const double scales = std::ceil(n / kRun) * 4;
  const std::string norm = spec.norm == QuantizedSpec::Norm::kMax ? "largest magnitude" : "Euclidean norm";
  switch (spec.scheme) {
    case Scheme::kFp16:
      return {"  every element rounded to binary16; the rest goes to the residual\n", 2 * n};
    case Scheme::kOneBit:
      return {"  the sign of each element, and per run the mean of either sign; the rest goes to the residual\n",
              n / 8 + 2 * scales};
    case Scheme::kSignSgd:
      return {"  the sign of each element, and nothing else: the magnitude of a step is the learning rate\n", n / 8};
    case Scheme::kSigNum:
      return {absl::StrFormat("  momentum=%g  the sign of the momentum that each worker keeps of its gradients\n",
                              spec.momentum),
              n / 8};
    case Scheme::kEfSignSgd:
      return {"  the sign of each element times the mean magnitude of its run; the rest goes to the residual\n",
              n / 8 + scales};
    case Scheme::kTernGrad:
      return {spec.clip == 0
                  ? "  clip=0  each element becomes 0 or the largest magnitude of its run, by chance; unbiased\n"
                  : absl::StrFormat("  clip=%g  each element becomes 0 or the largest magnitude of its run, by "
                                    "chance, after clipping at so many standard deviations\n",
                                    spec.clip),
              n / 5 + scales};
    case Scheme::kQsgd:
    case Scheme::kLinear:
      return {absl::StrFormat(
                  "  bits=%d  each element becomes one of %d even levels of its run's %s, by chance; unbiased\n",
                  spec.bits, (1 << (spec.bits - 1)) - 1, norm),
              n * spec.bits / 8 + scales};
    case Scheme::kNatural:
      return {absl::StrFormat("  bits=%d  each element becomes one of %d powers of two below its run's %s, by chance; "
                              "unbiased\n",
                              spec.bits, (1 << (spec.bits - 1)) - 1, norm),
              n * spec.bits / 8 + scales};
  }
  return {};
}

class Reader final : public BodyReader {
 public:
  Reader(const Job& job, const BucketLayout& slice, const QuantizedSpec& spec)
      : shape_{{&job, &slice, nullptr}, spec, MakeQuantizer(spec)} {}

  absl::Status Read(const Segment& s, const Bytes&, BodyBuilder* body) override {
    if (s.type != SegmentType::kQuantized) return NotOfAnUpdate(s);
    GW_RETURN_IF_ERROR(body->Begin(Update::Body::kDenseFloat));
    GW_RETURN_IF_ERROR(shape_.CheckSegment(body->update().round, s));
    GW_RETURN_IF_ERROR(body->Advance(s));
    return shape_.Decode(s, body->NewPart(s));
  }

 private:
  const Shape shape_;
};

class QuantizedFamily final : public CodecFamily {
 public:
  absl::StatusOr<std::unique_ptr<Codec>> Make(const CodecContext& context, const CodecSpec& spec) const override {
    return MakeQuantizedCodec(context, std::get<QuantizedSpec>(spec));
  }
  Explanation Explain(const CodecSpec& spec, uint64_t elements) const override {
    return quantized::Explain(std::get<QuantizedSpec>(spec), elements);
  }
  TrainingDefaults Training(const CodecSpec& spec) const override {
    using Scheme = QuantizedSpec::Scheme;
    switch (std::get<QuantizedSpec>(spec).scheme) {
      case Scheme::kOneBit:
      case Scheme::kEfSignSgd:
        return {.push_steps = true};
      case Scheme::kSignSgd:
        return {.gradients_to_sgd = true};
      case Scheme::kSigNum:
        return {.push_steps = true, .gradients_to_sgd = true};
      case Scheme::kFp16:
      case Scheme::kTernGrad:
      case Scheme::kQsgd:
      case Scheme::kLinear:
      case Scheme::kNatural:
        return {};
    }
    return {};
  }
  SegmentType CompressedType(const CodecSpec&) const override { return SegmentType::kQuantized; }
  std::unique_ptr<BodyReader> NewCompressedReader(const Job& job, const BucketLayout& slice,
                                                  const CodecSpec& spec) const override {
    return std::make_unique<Reader>(job, slice, std::get<QuantizedSpec>(spec));
  }
};

}  // namespace

const CodecFamily& Family() {
  static const QuantizedFamily family;
  return family;
}

}  // namespace gradwire::quantized

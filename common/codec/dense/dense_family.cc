// The dense codecs as a kind: plans of fixed point, updates of integers and of bfloat16, and what they are in words.
#include <cstring>
#include <memory>

#include "common/base/status_macros.h"
#include "common/codec/bits/index_code.h"
#include "common/codec/dense/dense_codec.h"
#include "kernels/math/half.h"

namespace gradwire::dense {
namespace {

using wire::Segment;
using wire::SegmentType;

Explanation Explain(const DenseSpec& spec, uint64_t elements) {
  const double n = static_cast<double>(elements);
  switch (spec.values) {
    case DenseSpec::Values::kFp32:
      return {"  values=fp32    every element as it is; no residual\n", 4 * n};
    case DenseSpec::Values::kBf16:
      return {"  values=bf16    every element rounded to bfloat16; the rest goes to the residual\n", 2 * n};
    case DenseSpec::Values::kFixed32:
      return {"  values=fixed32 32-bit integers with one exponent per run; the rest goes to the residual\n", 4 * n};
    case DenseSpec::Values::kFixed16:
      return {"  values=fixed16 16-bit integers with one exponent per run; the rest goes to the residual\n", 2 * n};
  }
  return {};
}

// Sums of fixed point.
class IntegerReader final : public BodyReader {
 public:
  absl::Status Read(const Segment& s, const Bytes& chunk, BodyBuilder* body) override {
    if (s.type != SegmentType::kDenseInt && s.type != SegmentType::kDensePacked) return NotOfAnUpdate(s);
    GW_RETURN_IF_ERROR(body->Begin(Update::Body::kDenseInt));
    GW_RETURN_IF_ERROR(body->Advance(s));
    if (s.type == SegmentType::kDensePacked) {
      std::shared_ptr<int32_t[]> unpacked = std::make_shared_for_overwrite<int32_t[]>(s.count);
      GW_RETURN_IF_ERROR(UnpackIntegers(s.payload(), s.param, s.count, unpacked.get()));
      const uint8_t* values = reinterpret_cast<const uint8_t*>(unpacked.get());
      body->AddPart(s, Bytes(std::move(unpacked), values, size_t{4} * s.count));
      return absl::OkStatus();
    }
    if (s.param != 4) return absl::InvalidArgumentError("dense integers of an update frame are 4 bytes wide");
    GW_RETURN_IF_ERROR(CheckBytes(s, uint64_t{s.count} * 4));
    body->AddPart(s, PayloadOf(s, chunk));
    return absl::OkStatus();
  }
};

class Bf16Reader final : public BodyReader {
 public:
  absl::Status Read(const Segment& s, const Bytes&, BodyBuilder* body) override {
    if (s.type != SegmentType::kDenseBf16) return NotOfAnUpdate(s);
    GW_RETURN_IF_ERROR(body->Begin(Update::Body::kDenseFloat));
    GW_RETURN_IF_ERROR(CheckBytes(s, uint64_t{s.count} * 2));
    GW_RETURN_IF_ERROR(body->Advance(s));
    float* const out = body->NewPart(s);
    for (uint32_t i = 0; i < s.count; ++i) {
      uint16_t bits;
      std::memcpy(&bits, s.data + 2 * size_t{i}, sizeof(bits));
      out[i] = kernels::Bf16ToFloat(bits);
    }
    return absl::OkStatus();
  }
};

class DenseFamily final : public CodecFamily {
 public:
  absl::StatusOr<std::unique_ptr<Codec>> Make(const CodecContext& context, const CodecSpec& spec) const override {
    return MakeDenseCodec(context, std::get<DenseSpec>(spec));
  }
  Explanation Explain(const CodecSpec& spec, uint64_t elements) const override {
    return dense::Explain(std::get<DenseSpec>(spec), elements);
  }
  bool PlansExponents(const CodecSpec& spec) const override { return std::get<DenseSpec>(spec).fixed(); }
  std::unique_ptr<BodyReader> NewSumReader(const Job& job, const BucketLayout& slice) const override {
    if (PlansExponents(job.codecs()[slice.codec])) return std::make_unique<IntegerReader>();
    return std::make_unique<BodyReader>();
  }
  SegmentType CompressedType(const CodecSpec& spec) const override {
    const bool bf16 = std::get<DenseSpec>(spec).values == DenseSpec::Values::kBf16;
    return bf16 ? SegmentType::kDenseBf16 : SegmentType::kDenseF32;
  }
  std::unique_ptr<BodyReader> NewCompressedReader(const Job&, const BucketLayout&, const CodecSpec&) const override {
    return std::make_unique<Bf16Reader>();
  }
};

}  // namespace

const CodecFamily& Family() {
  static const DenseFamily family;
  return family;
}

}  // namespace gradwire::dense

// See update_body.h.
#include "common/codec/update/update_body.h"

#include <variant>

namespace gradwire {

bool IsUpdateBody(wire::SegmentType type) {
  switch (type) {
    case wire::SegmentType::kDenseF32:
    case wire::SegmentType::kDenseBf16:
    case wire::SegmentType::kDenseInt:
    case wire::SegmentType::kDensePacked:
    case wire::SegmentType::kIndex:
    case wire::SegmentType::kValues:
    case wire::SegmentType::kQuantized:
    case wire::SegmentType::kSparse:
    case wire::SegmentType::kLevelSums:
      return true;
    default:
      return false;
  }
}

wire::SegmentType UpdateBodyOf(const CodecSpec& update_codec) {
  if (std::holds_alternative<QuantizedSpec>(update_codec)) return wire::SegmentType::kQuantized;
  if (std::holds_alternative<SparseSpec>(update_codec)) return wire::SegmentType::kSparse;
  const auto* dense = std::get_if<DenseSpec>(&update_codec);
  const bool bf16 = dense != nullptr && dense->values == DenseSpec::Values::kBf16;
  return bf16 ? wire::SegmentType::kDenseBf16 : wire::SegmentType::kDenseF32;
}

}  // namespace gradwire

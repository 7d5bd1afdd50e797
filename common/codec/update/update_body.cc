// See update_body.h.
#include "common/codec/update/update_body.h"

namespace gradwire {

bool IsUpdateBody(wire::SegmentType type) {
  switch (type) {
    case wire::SegmentType::kDenseF32:
    case wire::SegmentType::kDenseBf16:
    case wire::SegmentType::kDenseInt:
    case wire::SegmentType::kDensePacked:
    case wire::SegmentType::kIndex:
    case wire::SegmentType::kValues:
    case wire::SegmentType::kList:
    case wire::SegmentType::kQuantized:
    case wire::SegmentType::kSparse:
    case wire::SegmentType::kLevelSums:
      return true;
    default:
      return false;
  }
}

}  // namespace gradwire

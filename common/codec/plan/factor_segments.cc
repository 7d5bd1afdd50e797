// See factor_segments.h.
#include "common/codec/plan/factor_segments.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"

namespace gradwire {
namespace {

using wire::Segment;
using wire::SegmentType;

constexpr uint64_t kSegmentValues = 65536;

}  // namespace

void AddFactors(std::span<const float> values, wire::FrameWriter* writer) {
  for (uint64_t begin = 0; begin < values.size(); begin += kSegmentValues) {
    const auto count = static_cast<uint32_t>(std::min<uint64_t>(kSegmentValues, values.size() - begin));
    writer->Add({SegmentType::kFactors, 0, begin, count, count * 4}, values.data() + begin);
  }
}

absl::Status CheckFactors(const Segment& s, uint64_t size) {
  if (s.type == SegmentType::kFactors && s.param == 0 && s.begin <= size && s.count <= size - s.begin &&
      s.bytes == uint64_t{s.count} * 4) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("segment type %d (param %d) with %d bytes for [%d, %d + %d) of %d factor values",
                      static_cast<int>(s.type), s.param, s.bytes, s.begin, s.begin, s.count, size));
}

absl::Status ReadFactors(const Segment& s, uint64_t size, std::vector<float>* factors) {
  GW_RETURN_IF_ERROR(CheckFactors(s, size));
  if (s.begin != factors->size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("factor values begin at %d, expected %d", s.begin, factors->size()));
  }
  factors->resize(s.begin + s.count);
  if (s.bytes != 0) std::memcpy(factors->data() + s.begin, s.data, s.bytes);
  return absl::OkStatus();
}

}  // namespace gradwire

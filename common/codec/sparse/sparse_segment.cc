// See sparse_segment.h.
#include "common/codec/sparse/sparse_segment.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/sparse/agreed.h"

namespace gradwire::sparse {
namespace {

using wire::Segment;
using wire::SegmentHeader;
using wire::SegmentType;

// The param of a segment: index coding in the lower half, value format in the upper one, plus kCoded where its integers
// are coded.
constexpr int kFormats = 7;
constexpr int kCoded = 8;

uint8_t ParamOf(uint8_t coding, int format) { return static_cast<uint8_t>(coding | format << 4); }

}  // namespace

ValueFormat FormatOf(uint8_t param) { return static_cast<ValueFormat>(param >> 4 & (kCoded - 1)); }

void WritePairs(std::span<const uint32_t> positions, std::span<float> values, uint64_t begin, uint32_t count,
                const PairForm& form, const Agreement& agreement, wire::FrameWriter* writer) {
  const size_t value_bytes = BytesOf(form.values, positions.size());
  // An index is no larger than a bitmap, or than the coordinates that were asked for.
  const size_t index_bound =
      std::max(size_t{count / 8}, form.index == IndexForm::kCoordinates ? 4 * positions.size() : 0);
  if (count > 64 && value_bytes + index_bound + 16 > writer->max_payload()) {
    const uint32_t half = count / 2;
    const size_t cut =
        static_cast<size_t>(std::lower_bound(positions.begin(), positions.end(), begin + half) - positions.begin());
    WritePairs(positions.first(cut), values.first(cut), begin, half, form, agreement, writer);
    WritePairs(positions.subspan(cut), values.subspan(cut), begin + half, count - half, form, agreement, writer);
    return;
  }
  CodedIndex index;
  uint8_t coding = kAgreedCoding;
  if (agreement.density == 0) {
    index = EncodeIndex(positions, static_cast<uint32_t>(begin), count, form.index);
    coding = static_cast<uint8_t>(index.coding);
  }
  const uint32_t index_bytes = static_cast<uint32_t>(index.payload.size());
  const std::vector<uint8_t> coded = CodeValues(form.values, values.data(), values.size());
  const int format = static_cast<int>(form.values) + (coded.empty() ? 0 : kCoded);
  const uint32_t bytes = 4 + index_bytes + static_cast<uint32_t>(coded.empty() ? value_bytes : coded.size());
  uint8_t* out = writer->Begin({SegmentType::kSparse, ParamOf(coding, format), begin, count, bytes});
  std::memcpy(out, &index_bytes, 4);
  if (index_bytes != 0) std::memcpy(out + 4, index.payload.data(), index_bytes);
  out += 4 + index_bytes;
  if (coded.empty()) {
    WriteValues(form.values, values.data(), values.size(), out);
    ReadValues(form.values, {out, value_bytes}, values.size(), values.data()).IgnoreError();
  } else {
    std::copy(coded.begin(), coded.end(), out);
    ReadCodedValues(form.values, coded, values.size(), values.data()).IgnoreError();
  }
  writer->End();
}

absl::Status ReadPairs(const Segment& s, const Agreement& agreement, Pairs* out, const LookAhead& ahead) {
  const uint8_t coding = s.param & 15;
  const bool coded = (s.param >> 4 & kCoded) != 0;
  const ValueFormat format = FormatOf(s.param);
  if (static_cast<int>(format) >= kFormats || s.count > kMaxSegmentElements || s.bytes < 4) {
    return absl::InvalidArgumentError(
        absl::StrFormat("sparse segment of %d elements in %d bytes, value format %d", s.count, s.bytes, s.param >> 4));
  }
  uint32_t index_bytes = 0;
  std::memcpy(&index_bytes, s.data, 4);
  const std::span<const uint8_t> payload = s.payload().subspan(4);
  if (index_bytes > payload.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("sparse segment: an index of %d bytes in %d", index_bytes, payload.size()));
  }
  const size_t before = out->positions.size();
  absl::Status status;
  // The update has no index either: values at other positions would be read as those of the agreed ones.
  if ((coding == kAgreedCoding) != (agreement.density != 0)) {
    status = absl::InvalidArgumentError(coding == kAgreedCoding
                                            ? "sparse segment without positions, which were not agreed on"
                                            : "sparse segment with positions of its own, where they are agreed on");
  } else if (coding == kAgreedCoding && index_bytes != 0) {
    status = absl::InvalidArgumentError(
        absl::StrFormat("sparse segment with an index of %d bytes, where positions are agreed on", index_bytes));
  } else if (coding == kAgreedCoding) {
    AgreedPositions(*agreement.job, *agreement.layout, agreement.round, agreement.density, s.begin, s.count,
                    &out->positions);
  } else {
    status = DecodeIndex(static_cast<IndexCoding>(coding), payload.first(index_bytes), static_cast<uint32_t>(s.begin),
                         s.count, &out->positions, ahead);
  }
  const size_t n = out->positions.size() - before;
  if (status.ok()) {
    out->values.resize(before + n);
    status =
        (coded ? ReadCodedValues : ReadValues)(format, payload.subspan(index_bytes), n, out->values.data() + before);
  }
  if (status.ok()) return status;
  out->positions.resize(before);
  out->values.resize(before);
  return status;
}

}  // namespace gradwire::sparse

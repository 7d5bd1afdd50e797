// See list_segment.h.
#include "common/codec/tagc/list_segment.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"

namespace gradwire::tagc {

using wire::SegmentType;

namespace {

constexpr int kCodingBits = 3;  // of a list's param; above them the bits packed of its integers, less 1

uint8_t ParamOf(IndexCoding coding, int bits) {
  return static_cast<uint8_t>(static_cast<unsigned>(coding) | static_cast<unsigned>(bits - 1) << kCodingBits);
}
IndexCoding CodingOf(uint8_t param) { return static_cast<IndexCoding>(param & ((1u << kCodingBits) - 1)); }
int BitsOf(uint8_t param) { return (param >> kCodingBits) + 1; }

}  // namespace

void AddLists(const TagcShape& shape, std::span<const uint32_t> positions, std::span<const int32_t> integers,
              uint64_t begin, uint64_t end, wire::FrameWriter* writer) {
  std::vector<uint8_t> payload;
  for (size_t first = 0; begin < end;) {
    uint32_t count = static_cast<uint32_t>(std::min<uint64_t>(shape.index_block, end - begin));
    size_t last = first;
    for (;; count /= 2) {
      last = static_cast<size_t>(
          std::lower_bound(positions.begin() + static_cast<ptrdiff_t>(first), positions.end(), begin + count) -
          positions.begin());
      if (last - first <= kMostListed) break;
    }
    const CodedIndex coded = EncodeIndex(positions.subspan(first, last - first), static_cast<uint32_t>(begin), count);
    const std::span<const int32_t> listed = integers.subspan(first, last - first);
    CodedIntegers values;
    payload.clear();
    if (!listed.empty()) {
      values = EncodeIntegers(listed);
      PutNumber(coded.payload.size(), &payload);
      payload.insert(payload.end(), coded.payload.begin(), coded.payload.end());
      payload.insert(payload.end(), values.payload.begin(), values.payload.end());
    }
    const uint32_t bytes = static_cast<uint32_t>(payload.size());
    writer->Add({SegmentType::kList, ParamOf(coded.coding, values.bits), begin, count, bytes}, payload.data());
    first = last;
    begin += count;
  }
}

absl::Status ReadList(const wire::Segment& list, const LookAhead& ahead, std::vector<uint32_t>* positions,
                      std::vector<int32_t>* integers, IntegerScratch* scratch) {
  const auto bad = [&](std::string_view what) {
    return absl::InvalidArgumentError(
        absl::StrFormat("list of [%d, %d + %d) in %d bytes %s", list.begin, list.begin, list.count, list.bytes, what));
  };
  const size_t before = positions->size();
  std::span<const uint8_t> payload = list.payload();
  if (payload.empty()) {
    integers->resize(before);
    return list.param == ParamOf(IndexCoding::kEmpty, 1) ? absl::OkStatus() : bad("has no positions");
  }
  uint64_t index_bytes = 0;
  if (!TakeNumber(&payload, &index_bytes) || index_bytes > payload.size()) return bad("is cut short");
  GW_RETURN_IF_ERROR(DecodeIndex(CodingOf(list.param), payload.first(index_bytes), static_cast<uint32_t>(list.begin),
                                 list.count, positions, ahead));
  payload = payload.subspan(index_bytes);
  const size_t listed = positions->size() - before;
  if (listed == 0 || !MayHoldIntegers(payload, BitsOf(list.param), listed))
    return bad("does not have one integer for each position");
  integers->resize(positions->size());
  const absl::Status read = DecodeIntegers(payload, BitsOf(list.param), listed, integers->data() + before, scratch);
  return read.ok() ? read : bad(absl::StrCat("does not have one integer for each position: ", read.message()));
}

}  // namespace gradwire::tagc

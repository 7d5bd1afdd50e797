// Lists beside sketches; see listed.h.
#include "common/codec/tagc/listed.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/bits/index_code.h"

namespace gradwire::tagc {

using wire::SegmentHeader;
using wire::SegmentType;

namespace {

static_assert(sizeof(SegmentHeader) == wire::kSegmentHeaderBytes);

int32_t LoadCell(const uint8_t* p, int cell_bytes) {
  if (cell_bytes == 1) return static_cast<int8_t>(*p);
  int16_t narrow = 0;
  int32_t wide = 0;
  if (cell_bytes == 2) std::memcpy(&narrow, p, sizeof(narrow));
  if (cell_bytes == 4) std::memcpy(&wide, p, sizeof(wide));
  return cell_bytes == 2 ? narrow : wide;
}

}  // namespace

void AddListed(const TagcShape& shape, std::span<const uint32_t> positions, std::span<const int32_t> integers,
               uint64_t begin, uint64_t end, wire::FrameWriter* writer) {
  const size_t width = static_cast<size_t>(shape.cell_bytes);
  std::vector<uint8_t> payload;
  for (size_t first = 0; begin < end;) {
    uint32_t count = static_cast<uint32_t>(std::min<uint64_t>(shape.index_block, end - begin));
    size_t last = first;
    for (;; count /= 2) {
      last = static_cast<size_t>(
          std::lower_bound(positions.begin() + static_cast<ptrdiff_t>(first), positions.end(), begin + count) -
          positions.begin());
      if (last - first <= kMaxListedPerSegment) break;
    }
    const CodedIndex coded = EncodeIndex(positions.subspan(first, last - first), static_cast<uint32_t>(begin), count);
    payload.clear();
    if (last != first) {
      const uint32_t index_bytes = static_cast<uint32_t>(coded.payload.size());
      payload.resize(sizeof(index_bytes) + index_bytes + (last - first) * width);
      std::memcpy(payload.data(), &index_bytes, sizeof(index_bytes));
      std::copy(coded.payload.begin(), coded.payload.end(), payload.begin() + sizeof(index_bytes));
      uint8_t* out = payload.data() + sizeof(index_bytes) + index_bytes;
      for (size_t i = first; i < last; ++i, out += width) std::memcpy(out, &integers[i], width);  // little-endian
    }
    writer->Add(
        {SegmentType::kListed, static_cast<uint8_t>(coded.coding), begin, count, static_cast<uint32_t>(payload.size())},
        payload.data());
    first = last;
    begin += count;
  }
}

void ListedSegments::Clear() {
  held_.clear();
  entries_ = 0;
}

absl::Status ListedSegments::Add(const wire::Segment& s) {
  const uint64_t size = held_.size() + ListedBytesOf(s.bytes);
  if (size > Limit(shape_)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("bucket %d: lists of %d bytes in all; %d workers send at most %d each, the rest is sketched",
                        shape_.layout().bucket, size, shape_.max_workers(), shape_.listed_bytes));
  }
  scratch_.clear();
  GW_RETURN_IF_ERROR(Read(s, s.payload(), &scratch_));
  if (scratch_.empty()) return absl::OkStatus();
  if (size > held_.capacity()) held_.reserve(std::min(Limit(shape_), std::max<uint64_t>(size, 2 * held_.capacity())));
  const SegmentHeader header = s;
  const auto* raw = reinterpret_cast<const uint8_t*>(&header);
  held_.insert(held_.end(), raw, raw + sizeof(header));
  held_.insert(held_.end(), s.data, s.data + s.bytes);
  entries_ += scratch_.size();
  return absl::OkStatus();
}

void ListedSegments::Remove(const wire::Segment& s) {
  if (s.bytes == 0) return;
  ForEach([&](const SegmentHeader& h, std::span<const uint8_t> payload, size_t offset) {
    if (h.begin != s.begin || h.count != s.count || h.param != s.param || h.bytes != s.bytes ||
        std::memcmp(payload.data(), s.data, s.bytes) != 0) {
      return true;
    }
    scratch_.clear();
    Read(h, payload, &scratch_).IgnoreError();  // was added
    entries_ -= scratch_.size();
    const auto first = held_.begin() + static_cast<ptrdiff_t>(offset);
    held_.erase(first, first + static_cast<ptrdiff_t>(ListedBytesOf(s.bytes)));
    return false;
  });
}

std::vector<Listed> ListedSegments::Sums() const {
  std::vector<Listed> all;
  all.reserve(entries_);
  ForEach([&](const SegmentHeader& h, std::span<const uint8_t> payload, size_t) {
    Read(h, payload, &all).IgnoreError();  // was added
    return true;
  });
  std::sort(all.begin(), all.end(), [](const Listed& a, const Listed& b) { return a.position < b.position; });
  size_t kept = 0;
  for (const Listed& listed : all) {
    // A frame names a position once and max_workers frames fit an integer (TagcShape::limit), so this does not wrap.
    if (kept != 0 && all[kept - 1].position == listed.position) {
      all[kept - 1].integer += listed.integer;
    } else {
      all[kept++] = listed;
    }
  }
  all.resize(kept);
  return all;
}

absl::Status ListedSegments::Read(const SegmentHeader& h, std::span<const uint8_t> payload,
                                  std::vector<Listed>* out) const {
  const auto bad = [&](std::string_view what) {
    return absl::InvalidArgumentError(absl::StrFormat("bucket %d: list of [%d, %d + %d) in %d bytes %s",
                                                      shape_.layout().bucket, h.begin, h.begin, h.count, h.bytes,
                                                      what));
  };
  if (payload.empty()) {
    return h.param == static_cast<uint8_t>(IndexCoding::kEmpty) ? absl::OkStatus() : bad("has no positions");
  }
  uint32_t index_bytes = 0;
  if (payload.size() < sizeof(index_bytes)) return bad("is cut short");
  std::memcpy(&index_bytes, payload.data(), sizeof(index_bytes));
  payload = payload.subspan(sizeof(index_bytes));
  if (index_bytes > payload.size()) return bad("is cut short");
  std::vector<uint32_t> positions;
  GW_RETURN_IF_ERROR(DecodeIndex(static_cast<IndexCoding>(h.param), payload.first(index_bytes),
                                 static_cast<uint32_t>(h.begin), h.count, &positions));
  payload = payload.subspan(index_bytes);
  const size_t width = static_cast<size_t>(shape_.cell_bytes);
  if (positions.empty() || payload.size() != positions.size() * width) return bad("does not have one integer for each");
  const size_t before = out->size();
  for (size_t i = 0; i < positions.size(); ++i) {
    const int32_t integer = LoadCell(payload.data() + i * width, shape_.cell_bytes);
    if (integer > shape_.limit || integer < -shape_.limit) {
      out->resize(before);
      return bad(absl::StrFormat("has %d for element %d; one worker's integers lie within %d", integer, positions[i],
                                 shape_.limit));
    }
    out->push_back({positions[i], integer});
  }
  return absl::OkStatus();
}

template <typename Fn>
void ListedSegments::ForEach(Fn fn) const {
  for (size_t offset = 0; offset < held_.size();) {
    SegmentHeader header;
    std::memcpy(&header, held_.data() + offset, sizeof(header));
    const std::span<const uint8_t> payload(held_.data() + offset + sizeof(header), header.bytes);
    if (!fn(header, payload, offset)) return;
    offset += sizeof(header) + header.bytes;
  }
}

}  // namespace gradwire::tagc

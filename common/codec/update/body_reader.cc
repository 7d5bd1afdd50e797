// See body_reader.h.
#include "common/codec/update/body_reader.h"

#include <memory>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/bits/index_code.h"

namespace gradwire {
namespace {

absl::Status CheckRange(const wire::Segment& s, uint64_t limit) {
  if (s.begin <= limit && s.count <= limit - s.begin) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("segment type %d covers [%d, %d + %d) of %d",
                                                    static_cast<int>(s.type), s.begin, s.begin, s.count, limit));
}

}  // namespace

absl::Status CheckBytes(const wire::Segment& s, uint64_t expected) {
  if (s.bytes == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("segment type %d has %d bytes of payload, expected %d",
                                                    static_cast<int>(s.type), s.bytes, expected));
}

absl::Status NotOfAnUpdate(const wire::Segment& s) {
  return absl::InvalidArgumentError(
      absl::StrFormat("segment type %d does not belong in an update frame", static_cast<int>(s.type)));
}

absl::Status MissingExponents(const Update& update) {
  return absl::FailedPreconditionError(absl::StrFormat(
      "update frame of round %d needs the exponents of its round; they are not known here", update.round));
}

Bytes PayloadOf(const wire::Segment& s, const Bytes& chunk) {
  return chunk.Slice(static_cast<size_t>(s.data - chunk.data()), s.bytes);
}

absl::Status BodyBuilder::Begin(Update::Body body) {
  if (update_.body != Update::Body::kEmpty && update_.body != body) {
    return absl::InvalidArgumentError("update frame mixes two kinds of body");
  }
  update_.body = body;
  return absl::OkStatus();
}

absl::Status BodyBuilder::Advance(const wire::Segment& s) {
  GW_RETURN_IF_ERROR(CheckRange(s, layout_.elements));
  if (s.begin != covered_) {
    return absl::InvalidArgumentError(absl::StrFormat("segment begins at %d, expected %d", s.begin, covered_));
  }
  covered_ += s.count;
  return absl::OkStatus();
}

void BodyBuilder::AddPart(const wire::Segment& s, Bytes values) {
  if (s.count != 0) update_.dense.push_back({s.begin, s.count, std::move(values)});
}

float* BodyBuilder::NewPart(const wire::Segment& s) {
  std::shared_ptr<float[]> values = std::make_shared_for_overwrite<float[]>(s.count);
  float* const out = values.get();
  AddPart(s, Bytes(std::move(values), reinterpret_cast<const uint8_t*>(out), size_t{4} * s.count));
  return out;
}

absl::Status BodyBuilder::CheckPositions(const wire::Segment& s, const std::vector<uint32_t>& before) const {
  GW_RETURN_IF_ERROR(CheckRange(s, layout_.elements));
  if (before.empty() || s.begin > before.back()) return absl::OkStatus();
  return absl::InvalidArgumentError("position blocks are not ascending");
}

absl::Status BodyBuilder::AppendPositions(const wire::Segment& s, std::vector<uint32_t>* positions) const {
  GW_RETURN_IF_ERROR(CheckPositions(s, *positions));
  return DecodeIndex(static_cast<IndexCoding>(s.param), s.payload(), static_cast<uint32_t>(s.begin), s.count,
                     positions);
}

absl::Status BodyBuilder::Check() const {
  const Update::Body body = update_.body;
  if (body != Update::Body::kEmpty && body != Update::Body::kSparse && covered_ != layout_.elements) {
    return absl::InvalidArgumentError(
        absl::StrFormat("update frame covers %d of %d elements", covered_, layout_.elements));
  }
  if (body == Update::Body::kSparse && update_.positions.size() != update_.integers.size()) {
    return absl::InvalidArgumentError(absl::StrFormat("update frame has %d positions and %d values",
                                                      update_.positions.size(), update_.integers.size()));
  }
  return absl::OkStatus();
}

absl::Status BodyReader::Read(const wire::Segment& s, const Bytes&, BodyBuilder*) { return NotOfAnUpdate(s); }
absl::Status BodyReader::Finish(const RoundPlan&, BodyBuilder*) { return absl::OkStatus(); }

}  // namespace gradwire

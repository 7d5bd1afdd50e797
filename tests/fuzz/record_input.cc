// See record_input.h.
#include "tests/fuzz/record_input.h"

#include <algorithm>
#include <cstring>

#include "common/base/crc32c.h"
#include "tests/conformance/codec/codec_harness.h"
#include "tests/fuzz/target.h"

namespace gradwire::fuzz {
namespace {

using journal::kAlignment;
using journal::kRecordHeaderBytes;

constexpr size_t kRecordCrcOffset = 60;

template <typename T>
void StoreAt(uint8_t* p, T value) {
  std::memcpy(p, &value, sizeof(value));
}

}  // namespace

size_t RepairRecord(std::span<uint8_t> bytes, uint64_t sequence) {
  uint8_t* const p = bytes.data();
  const uint64_t left = (bytes.size() - kRecordHeaderBytes) / kAlignment * kAlignment;
  uint64_t body;
  std::memcpy(&body, p + 24, sizeof(body));
  body = std::min(body / kAlignment * kAlignment, left);
  StoreAt(p + 24, body);
  StoreAt(p + 44, Crc32c({p + kRecordHeaderBytes, body}));
  StoreAt(p + 48, sequence);
  StoreAt(p + kRecordCrcOffset, Crc32c({p, kRecordCrcOffset}));
  return kRecordHeaderBytes + body;
}

void RequireRoundTrip(const journal::Record& record) {
  const std::vector<uint8_t> bytes = BytesOf(journal::EncodeRecord(record, 1, 0));
  const auto header = journal::DecodeRecordHeader(std::span(bytes).first(kRecordHeaderBytes));
  Require(header.ok(), "a record that was read can be written");
  const auto again = journal::DecodeRecordBody(*header, Bytes::Copy(std::span(bytes).subspan(kRecordHeaderBytes)));
  Require(again.ok() && again->contributions == record.contributions &&
              testing::Joined(again->chunks) == testing::Joined(record.chunks),
          "and read again, the same");
}

std::vector<uint8_t> BytesOf(const journal::EncodedRecord& encoded) {
  std::vector<uint8_t> bytes;
  for (const std::span<const uint8_t> piece : encoded.Pieces()) bytes.insert(bytes.end(), piece.begin(), piece.end());
  return bytes;
}

}  // namespace gradwire::fuzz

// A journal record cut into the messages of a Follow stream, and put together again.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/bytes.h"
#include "common/journal/record.h"

namespace gradwire {

inline constexpr size_t kMaxPieceBytes = 4u << 20;

// What a record takes in memory while it waits.
uint64_t HeldBytes(const journal::Record& record);

// The bytes of the record as they would stand in a segment, in pieces of at most kMaxPieceBytes. Shares its chunks.
std::vector<std::vector<Bytes>> PiecesOf(const journal::Record& record);

// Puts one record after the other together. Not thread-safe. Memory: one record, of at most `limit_bytes`.
class RecordAssembler {
 public:
  explicit RecordAssembler(uint64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // The record whose last piece this is. Errors: ResourceExhausted (longer than the limit); InvalidArgument, DataLoss
  // (journal::DecodeRecordHeader, DecodeRecordBody).
  absl::StatusOr<std::optional<journal::Record>> Add(std::span<const Bytes> piece, bool last);

 private:
  const uint64_t limit_bytes_;
  std::vector<uint8_t> bytes_;
};

}  // namespace gradwire

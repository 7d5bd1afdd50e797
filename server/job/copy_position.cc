// See copy_position.h.
#include "server/job/copy_position.h"

#include "absl/strings/numbers.h"
#include "common/base/sha256.h"

namespace gradwire {

uint64_t DigestOf(const journal::Record& record) {
  constexpr size_t kHexDigits = 16;
  journal::Record update = record;
  update.mean_chunks.clear();
  const journal::EncodedRecord encoded = journal::EncodeRecord(update, 0, 0);
  Sha256 sha;
  for (const std::span<const uint8_t> piece : encoded.Pieces()) sha.Update(piece);
  uint64_t digest = 0;
  return absl::SimpleHexAtoi(sha.Hex().substr(0, kHexDigits), &digest) ? digest : 0;
}

}  // namespace gradwire

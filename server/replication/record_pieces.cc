// See record_pieces.h.
#include "server/replication/record_pieces.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"

namespace gradwire {

uint64_t HeldBytes(const journal::Record& record) {
  constexpr uint64_t kOverheadBytes = 128;
  return kOverheadBytes + TotalSize(record.chunks) + TotalSize(record.mean_chunks);
}

std::vector<std::vector<Bytes>> PiecesOf(const journal::Record& record) {
  journal::EncodedRecord encoded = journal::EncodeRecord(record, 0, 0);
  std::vector<Bytes> parts = {Bytes::FromVector(std::move(encoded.lead))};
  parts.insert(parts.end(), encoded.chunks.begin(), encoded.chunks.end());
  if (encoded.padding_bytes > 0) parts.push_back(Bytes::FromVector(std::vector<uint8_t>(encoded.padding_bytes)));
  std::vector<std::vector<Bytes>> pieces(1);
  size_t room = kMaxPieceBytes;
  for (const Bytes& part : parts) {
    for (size_t begin = 0; begin < part.size();) {
      if (room == 0) {
        pieces.emplace_back();
        room = kMaxPieceBytes;
      }
      const size_t n = std::min(room, part.size() - begin);
      pieces.back().push_back(part.Slice(begin, n));
      begin += n;
      room -= n;
    }
  }
  return pieces;
}

absl::StatusOr<std::optional<journal::Record>> RecordAssembler::Add(std::span<const Bytes> piece, bool last) {
  if (bytes_.size() + TotalSize(piece) > limit_bytes_) {
    return absl::ResourceExhaustedError(absl::StrFormat("a record of more than %d bytes", limit_bytes_));
  }
  for (const Bytes& part : piece) bytes_.insert(bytes_.end(), part.data(), part.data() + part.size());
  if (!last) return std::optional<journal::Record>();
  const Bytes whole = Bytes::FromVector(std::exchange(bytes_, {}));
  GW_ASSIGN_OR_RETURN(
      const journal::RecordHeader header,
      journal::DecodeRecordHeader(whole.span().first(std::min<size_t>(whole.size(), journal::kRecordHeaderBytes))));
  GW_ASSIGN_OR_RETURN(journal::Record record,
                      journal::DecodeRecordBody(header, whole.Slice(journal::kRecordHeaderBytes,
                                                                    whole.size() - journal::kRecordHeaderBytes)));
  return std::optional<journal::Record>(std::move(record));
}

}  // namespace gradwire

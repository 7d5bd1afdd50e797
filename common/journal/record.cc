// Encoding and checking of segment headers and records; see record.h.
#include "common/journal/record.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_format.h"
#include "common/base/crc32c.h"
#include "common/base/little_endian.h"
#include "common/base/status_macros.h"
#include "common/wire/frame.h"

namespace gradwire::journal {
namespace {

constexpr uint32_t kSegmentMagic = 0x314A5747u;  // "GWJ1"
constexpr uint32_t kRecordMagic = 0x31525747u;   // "GWR1"
constexpr uint16_t kVersion = 4;
constexpr uint16_t kOldestVersion = 1;  // without kState; without the age of contributions, as 2; without kKept, as 3
constexpr size_t kCrcOffset = 60;       // in both headers
constexpr size_t kContributionBytes = 24;
constexpr uint32_t kMaxContributions = 65536;
constexpr uint32_t kMaxChunks = 1u << 20;
constexpr uint8_t kZeros[kAlignment] = {};

uint64_t Padded(uint64_t n) { return (n + kAlignment - 1) / kAlignment * kAlignment; }

bool AllZero(std::span<const uint8_t> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](uint8_t b) { return b == 0; });
}

// Magic and CRC of either header.
absl::Status CheckHeader(std::span<const uint8_t> bytes, uint32_t magic, const char* what) {
  if (Load<uint32_t>(bytes.data()) != magic) {
    return absl::InvalidArgumentError(
        absl::StrFormat("no %s: magic 0x%08x, expected 0x%08x", what, Load<uint32_t>(bytes.data()), magic));
  }
  const uint32_t crc = Crc32c(bytes.first(kCrcOffset));
  if (crc == Load<uint32_t>(bytes.data() + kCrcOffset)) return absl::OkStatus();
  return absl::DataLossError(absl::StrFormat("the %s fails its CRC-32C (computed 0x%08x, stored 0x%08x)", what, crc,
                                             Load<uint32_t>(bytes.data() + kCrcOffset)));
}

// Takes bytes from the front of a body; `ok` falls where there are too few.
struct BodyReader {
  std::span<const uint8_t> left;
  bool ok = true;
  std::span<const uint8_t> Take(uint64_t n) {
    if (n > left.size()) {
      ok = false;
      return {};
    }
    const std::span<const uint8_t> taken = left.first(n);
    left = left.subspan(n);
    return taken;
  }
};

absl::Status Misfit(const char* what) {
  return absl::InvalidArgumentError(absl::StrFormat("the body of the record does not fit its header: %s", what));
}

absl::StatusOr<Contribution> TakeContribution(BodyReader& body, uint64_t round) {
  const std::span<const uint8_t> fixed = body.Take(kContributionBytes);
  if (!body.ok) return Misfit("contributions");
  Contribution c;
  c.member = Load<uint64_t>(fixed.data());
  c.incarnation = Load<uint64_t>(fixed.data() + 8);
  c.digest = Load<uint32_t>(fixed.data() + 16);
  c.included = fixed[20] == 1;
  const uint8_t name_bytes = fixed[21];
  const std::span<const uint8_t> name = body.Take(Padded(name_bytes));
  const uint16_t age = Load<uint16_t>(fixed.data() + 22);
  if (!body.ok || fixed[20] > 1 || age > round || !AllZero(name.subspan(name_bytes))) return Misfit("contributions");
  c.round = round - age;
  c.worker.assign(name.begin(), name.begin() + name_bytes);
  return c;
}

}  // namespace

std::vector<uint8_t> EncodeSegmentHeader(const SegmentHeader& header) {
  std::vector<uint8_t> bytes(kSegmentHeaderBytes);
  uint8_t* p = bytes.data();
  Store<uint32_t>(p, kSegmentMagic);
  Store<uint16_t>(p + 4, kVersion);
  Store<uint64_t>(p + 8, header.sequence);
  Store<uint64_t>(p + 16, header.epoch);
  Store<uint64_t>(p + 24, header.identity.job_digest);
  Store<uint64_t>(p + 32, header.identity.layout_digest);
  Store<uint32_t>(p + 40, header.identity.shard);
  Store<uint64_t>(p + 48, header.previous_bytes);
  Store<uint32_t>(p + kCrcOffset, Crc32c({p, kCrcOffset}));
  return bytes;
}

absl::StatusOr<SegmentHeader> DecodeSegmentHeader(std::span<const uint8_t> bytes) {
  if (bytes.size() != kSegmentHeaderBytes) return absl::InvalidArgumentError("the segment header is cut off");
  GW_RETURN_IF_ERROR(CheckHeader(bytes, kSegmentMagic, "segment header"));
  const uint8_t* p = bytes.data();
  const uint16_t version = Load<uint16_t>(p + 4);
  if (version < kOldestVersion || version > kVersion) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "journal version %d is not supported (this server reads %d to %d)", version, kOldestVersion, kVersion));
  }
  if (Load<uint16_t>(p + 6) != 0 || Load<uint32_t>(p + 44) != 0 || Load<uint32_t>(p + 56) != 0) {
    return absl::InvalidArgumentError("reserved bytes of the segment header are not zero");
  }
  SegmentHeader header;
  header.sequence = Load<uint64_t>(p + 8);
  header.epoch = Load<uint64_t>(p + 16);
  header.identity = {Load<uint64_t>(p + 24), Load<uint64_t>(p + 32), Load<uint32_t>(p + 40)};
  header.previous_bytes = Load<uint64_t>(p + 48);
  return header;
}

std::vector<std::span<const uint8_t>> EncodedRecord::Pieces() const {
  std::vector<std::span<const uint8_t>> pieces;
  pieces.reserve(chunks.size() + 2);
  pieces.emplace_back(lead);
  for (const Bytes& chunk : chunks) pieces.push_back(chunk.span());
  pieces.push_back(std::span(kZeros).first(padding_bytes));
  return pieces;
}

EncodedRecord EncodeRecord(const Record& record, uint64_t sequence, uint64_t synced) {
  EncodedRecord out;
  out.chunks = record.chunks;
  out.chunks.insert(out.chunks.end(), record.mean_chunks.begin(), record.mean_chunks.end());
  size_t lead_bytes = kRecordHeaderBytes + Padded(4 * out.chunks.size());
  for (const Contribution& c : record.contributions) lead_bytes += kContributionBytes + Padded(c.worker.size());
  out.lead.resize(lead_bytes);
  uint8_t* p = out.lead.data() + kRecordHeaderBytes;
  for (const Contribution& c : record.contributions) {
    Store<uint64_t>(p, c.member);
    Store<uint64_t>(p + 8, c.incarnation);
    Store<uint32_t>(p + 16, c.digest);
    p[20] = c.included ? 1 : 0;
    p[21] = static_cast<uint8_t>(c.worker.size());
    Store<uint16_t>(p + 22, static_cast<uint16_t>(record.round - c.round));
    p = std::copy(c.worker.begin(), c.worker.end(), p + kContributionBytes);
    p += Padded(c.worker.size()) - c.worker.size();
  }
  for (const Bytes& chunk : out.chunks) {
    Store<uint32_t>(p, static_cast<uint32_t>(chunk.size()));
    p += 4;
  }
  const uint64_t frame_bytes = TotalSize(out.chunks);
  out.padding_bytes = Padded(frame_bytes) - frame_bytes;
  out.bytes = lead_bytes + Padded(frame_bytes);
  uint32_t crc = 0;
  for (std::span<const uint8_t> piece : out.Pieces()) {
    if (piece.data() == out.lead.data()) piece = piece.subspan(kRecordHeaderBytes);
    crc = Crc32c(piece, crc);
  }
  p = out.lead.data();
  Store<uint32_t>(p, kRecordMagic);
  p[4] = static_cast<uint8_t>(record.type);
  Store<uint32_t>(p + 8, record.bucket);
  Store<uint32_t>(p + 12, static_cast<uint32_t>(record.contributions.size()));
  Store<uint64_t>(p + 16, record.round);
  Store<uint64_t>(p + 24, out.bytes - kRecordHeaderBytes);
  Store<uint64_t>(p + 32, synced);
  Store<uint32_t>(p + 40, static_cast<uint32_t>(out.chunks.size()));
  Store<uint32_t>(p + 44, crc);
  Store<uint64_t>(p + 48, sequence);
  Store<uint32_t>(p + 56, static_cast<uint32_t>(record.mean_chunks.size()));
  Store<uint32_t>(p + kCrcOffset, Crc32c({p, kCrcOffset}));
  return out;
}

absl::StatusOr<RecordHeader> DecodeRecordHeader(std::span<const uint8_t> bytes) {
  if (bytes.size() != kRecordHeaderBytes) return absl::InvalidArgumentError("the record header is cut off");
  GW_RETURN_IF_ERROR(CheckHeader(bytes, kRecordMagic, "record header"));
  const uint8_t* p = bytes.data();
  if (p[4] < static_cast<uint8_t>(RecordType::kInitial) || p[4] > static_cast<uint8_t>(RecordType::kKept)) {
    return absl::InvalidArgumentError(absl::StrFormat("unknown record type %d", p[4]));
  }
  RecordHeader h;
  h.type = static_cast<RecordType>(p[4]);
  h.bucket = Load<uint32_t>(p + 8);
  h.contributions = Load<uint32_t>(p + 12);
  h.round = Load<uint64_t>(p + 16);
  h.body_bytes = Load<uint64_t>(p + 24);
  h.synced = Load<uint64_t>(p + 32);
  h.chunks = Load<uint32_t>(p + 40);
  h.body_crc = Load<uint32_t>(p + 44);
  h.sequence = Load<uint64_t>(p + 48);
  h.mean_chunks = Load<uint32_t>(p + 56);
  if (!AllZero(bytes.subspan(5, 3))) {
    return absl::InvalidArgumentError("reserved bytes of the record header are not zero");
  }
  const bool empty = h.chunks == 0 && h.type != RecordType::kKept;
  if (h.mean_chunks != 0 && (h.type != RecordType::kUpdate || h.mean_chunks >= h.chunks)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "the record header of type %d says that %d of %d chunks are those of a mean", p[4], h.mean_chunks, h.chunks));
  }
  if (h.body_bytes % kAlignment != 0 || h.contributions > kMaxContributions || empty || h.chunks > kMaxChunks) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the record header asks for %d bytes, %d contributions, %d chunks: over the limits",
                        h.body_bytes, h.contributions, h.chunks));
  }
  return h;
}

absl::StatusOr<Record> DecodeRecordBody(const RecordHeader& header, const Bytes& body) {
  if (body.size() != header.body_bytes) return Misfit("size");
  const uint32_t crc = Crc32c(body.span());
  if (crc != header.body_crc) {
    return absl::DataLossError(
        absl::StrFormat("the record's body fails its CRC-32C (computed 0x%08x, stored 0x%08x)", crc, header.body_crc));
  }
  Record record;
  record.type = header.type;
  record.bucket = header.bucket;
  record.round = header.round;
  BodyReader reader{body.span()};
  for (uint32_t i = 0; i < header.contributions; ++i) {
    GW_ASSIGN_OR_RETURN(Contribution contribution, TakeContribution(reader, header.round));
    record.contributions.push_back(std::move(contribution));
  }
  const std::span<const uint8_t> sizes = reader.Take(Padded(uint64_t{4} * header.chunks));
  if (!reader.ok || !AllZero(sizes.subspan(size_t{4} * header.chunks))) return Misfit("chunk sizes");
  for (uint32_t i = 0; i < header.chunks; ++i) {
    const uint32_t size = Load<uint32_t>(sizes.data() + size_t{4} * i);
    const size_t begin = body.size() - reader.left.size();
    reader.Take(size);
    if (!reader.ok || size == 0 || size > wire::kMaxChunkBytes) return Misfit("chunks");
    std::vector<Bytes>& frame = i < header.chunks - header.mean_chunks ? record.chunks : record.mean_chunks;
    frame.push_back(body.Slice(begin, size));
  }
  if (reader.left.size() >= kAlignment || !AllZero(reader.left)) return Misfit("bytes are left over");
  return record;
}

}  // namespace gradwire::journal

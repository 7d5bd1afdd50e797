// The bytes of a journal: segment headers and records. Spec: proto/JOURNAL.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/bytes.h"

namespace gradwire::journal {

inline constexpr size_t kSegmentHeaderBytes = 64;
inline constexpr size_t kRecordHeaderBytes = 64;
inline constexpr size_t kAlignment = 8;  // records begin at multiples of this

// Whose journal it is; every segment says so.
struct Identity {
  uint64_t job_digest = 0;
  uint64_t layout_digest = 0;
  uint32_t shard = 0;
  bool operator==(const Identity&) const = default;
};

struct SegmentHeader {
  uint64_t sequence = 0;
  uint64_t epoch = 0;  // of the server that writes it
  Identity identity;
  uint64_t previous_bytes = 0;  // of the segment before, when this one was opened
};

enum class RecordType : uint8_t {
  kInitial = 1,  // the initial parameters of a bucket
  kUpdate = 2,   // the update frame of a (bucket, round)
  // All of a bucket at version `round`: where the journal of a standby begins. Its contributions are those that workers
  // may send again, the oldest of each first.
  kState = 3,
  // Of an update whose own record is gone, or goes with the next cut: what workers that are away may still ask about.
  // Its contributions, and its frame where that defers elements that they have to take back (else no chunks). Without
  // any of them: all workers had left.
  kKept = 4,
};

// How much older than its record the round of a contribution may be.
inline constexpr uint64_t kMaxContributionAge = 65535;

// One worker's part in an update.
struct Contribution {
  uint64_t member = 0;  // MemberId
  std::string worker;   // empty: lost before the bucket closed
  uint64_t incarnation = 0;
  uint32_t digest = 0;    // of its frame (ExtendDigest)
  bool included = false;  // false: it abstained
  uint64_t round = 0;     // that its frame says; asynchronous rounds: the version that it was computed on
  bool operator==(const Contribution&) const = default;
};

struct Record {
  RecordType type = RecordType::kUpdate;
  uint32_t bucket = 0;
  uint64_t round = 0;
  std::vector<Contribution> contributions;
  std::vector<Bytes> chunks;
  // An update that was compressed on the shard: the frame of the mean that it was made from. Empty in others, and in
  // updates of rounds before a state.
  std::vector<Bytes> mean_chunks = {};
};

// The version of its bucket that there is with the record; 0: it makes none.
inline uint64_t VersionOf(const Record& record) {
  if (record.type == RecordType::kKept) return 0;
  return record.type == RecordType::kUpdate ? record.round + 1 : record.round;
}

std::vector<uint8_t> EncodeSegmentHeader(const SegmentHeader& header);
// Errors: InvalidArgument (not a segment, a version or reserved bytes that are not known), DataLoss (CRC).
absl::StatusOr<SegmentHeader> DecodeSegmentHeader(std::span<const uint8_t> bytes);

// A record as it is written; shares the memory of its chunks.
struct EncodedRecord {
  std::vector<uint8_t> lead;  // header, contributions, chunk sizes
  std::vector<Bytes> chunks;
  uint64_t padding_bytes = 0;
  uint64_t bytes = 0;  // all of it, a multiple of kAlignment
  // What to write, in order. Valid while this lives.
  std::vector<std::span<const uint8_t>> Pieces() const;
};
// `sequence`: of the segment; `synced`: bytes of it that are known to be on disk.
EncodedRecord EncodeRecord(const Record& record, uint64_t sequence, uint64_t synced);

struct RecordHeader {
  RecordType type{};
  uint32_t bucket = 0;
  uint32_t contributions = 0;
  uint64_t round = 0;
  uint64_t body_bytes = 0;
  uint64_t synced = 0;
  uint32_t chunks = 0;       // both frames
  uint32_t mean_chunks = 0;  // the last ones
  uint32_t body_crc = 0;
  uint64_t sequence = 0;
};
// `bytes`: kRecordHeaderBytes. Errors: InvalidArgument, DataLoss, as above.
absl::StatusOr<RecordHeader> DecodeRecordHeader(std::span<const uint8_t> bytes);
// `body`: header.body_bytes bytes, which the record shares. Reads nothing outside; errors as above.
absl::StatusOr<Record> DecodeRecordBody(const RecordHeader& header, const Bytes& body);

}  // namespace gradwire::journal

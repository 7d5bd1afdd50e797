// Walking segments and records, and telling a torn tail from damage; see journal_reader.h.
#include "common/journal/journal_reader.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"

namespace gradwire::journal {
namespace {

constexpr size_t kScanBytes = 1u << 20;

bool IsContentError(const absl::Status& status) {
  return absl::IsDataLoss(status) || absl::IsInvalidArgument(status) || absl::IsOutOfRange(status);
}

// One segment, up to `end`.
class SegmentReader {
 public:
  SegmentReader(ReadFile* file, uint64_t sequence) : file_(file), sequence_(sequence), end_(file->size()) {}

  void set_end(uint64_t end) { end_ = end; }
  uint64_t end() const { return end_; }

  absl::StatusOr<SegmentHeader> Header() {
    if (end_ < kSegmentHeaderBytes) return absl::OutOfRangeError("the segment header is cut off");
    std::vector<uint8_t> bytes(kSegmentHeaderBytes);
    GW_RETURN_IF_ERROR(file_->Read(0, bytes));
    GW_ASSIGN_OR_RETURN(const SegmentHeader header, DecodeSegmentHeader(bytes));
    if (header.sequence != sequence_) {
      return absl::InvalidArgumentError(
          absl::StrFormat("the header is that of segment %d, the name says %d", header.sequence, sequence_));
    }
    return header;
  }

  absl::StatusOr<RecordHeader> HeaderAt(uint64_t offset) {
    if (end_ - offset < kRecordHeaderBytes) return absl::OutOfRangeError("the record header is cut off");
    std::vector<uint8_t> bytes(kRecordHeaderBytes);
    GW_RETURN_IF_ERROR(file_->Read(offset, bytes));
    GW_ASSIGN_OR_RETURN(const RecordHeader header, DecodeRecordHeader(bytes));
    if (header.sequence != sequence_) {
      return absl::InvalidArgumentError(absl::StrFormat("a record of segment %d", header.sequence));
    }
    if (header.body_bytes > end_ - offset - kRecordHeaderBytes) {
      return absl::OutOfRangeError(absl::StrFormat("the record's body of %d bytes is cut off", header.body_bytes));
    }
    return header;
  }

  absl::StatusOr<Record> BodyAt(uint64_t offset, const RecordHeader& header) {
    std::vector<uint8_t> body(header.body_bytes);
    GW_RETURN_IF_ERROR(file_->Read(offset + kRecordHeaderBytes, body));
    return DecodeRecordBody(header, Bytes::FromVector(std::move(body)));
  }

  // The first intact record at or behind `begin` that says that more than `synced` bytes were on disk.
  absl::StatusOr<std::optional<uint64_t>> Find(uint64_t begin, uint64_t synced) {
    std::vector<uint8_t> window;
    while (begin < end_ && end_ - begin >= kRecordHeaderBytes) {
      window.resize(std::min<uint64_t>(kScanBytes, end_ - begin));
      GW_RETURN_IF_ERROR(file_->Read(begin, window));
      for (size_t i = 0; i + kRecordHeaderBytes <= window.size(); i += kAlignment) {
        const auto header = DecodeRecordHeader(std::span(window).subspan(i, kRecordHeaderBytes));
        if (!header.ok() || header->sequence != sequence_ || header->synced <= synced) continue;
        if (header->body_bytes > end_ - begin - i - kRecordHeaderBytes) continue;
        if (BodyAt(begin + i, *header).ok()) return std::optional<uint64_t>(begin + i);
      }
      // Headers that straddle two windows are looked at in the second.
      const uint64_t looked = window.size() - kRecordHeaderBytes + kAlignment;
      begin += looked / kAlignment * kAlignment;
    }
    return std::optional<uint64_t>();
  }

 private:
  ReadFile* const file_;
  const uint64_t sequence_;
  uint64_t end_;
};

class JournalScan {
 public:
  // `damaged`: whom to tell; null: damage is an error.
  JournalScan(Disk& disk, const std::string& directory, const Identity& identity, bool repair,
              const std::function<void(const Damage&)>* damaged, const std::function<absl::Status(Record)>& visit)
      : disk_(disk), directory_(directory), identity_(identity), repair_(repair), damaged_(damaged), visit_(visit) {}

  absl::StatusOr<ReadResult> Run() {
    GW_ASSIGN_OR_RETURN(const std::vector<uint64_t> sequences, ListSegments(disk_, directory_));
    for (size_t i = 0; i < sequences.size(); ++i) {
      if (i > 0 && sequences[i] != sequences[i - 1] + 1) {
        GW_RETURN_IF_ERROR(Found(SegmentPath(directory_, sequences[i - 1] + 1), 0, "the file is missing"));
      }
      GW_RETURN_IF_ERROR(ReadSegment(sequences[i], i + 1 == sequences.size()));
    }
    return std::move(result_);
  }

 private:
  absl::Status Found(const std::string& path, uint64_t offset, const std::string& what) const {
    if (damaged_ != nullptr) {
      (*damaged_)({path, offset, what});
      return absl::OkStatus();
    }
    return absl::DataLossError(absl::StrFormat(
        "journal damaged at '%s' offset %d: %s; restore the file from a copy, or the job by `gradwire restore`", path,
        offset, what));
  }

  absl::Status ReadSegment(uint64_t sequence, bool last) {
    const std::string path = SegmentPath(directory_, sequence);
    const absl::StatusOr<std::unique_ptr<ReadFile>> file = disk_.Open(path);
    if (absl::IsNotFound(file.status())) return Found(path, 0, "the file is missing");
    GW_RETURN_IF_ERROR(file.status());
    SegmentReader reader(file->get(), sequence);
    const absl::StatusOr<SegmentHeader> header = reader.Header();
    uint64_t offset = kSegmentHeaderBytes;
    if (header.ok()) {
      GW_ASSIGN_OR_RETURN(const bool ours, CheckHeader(path, *header));
      if (!ours) return absl::OkStatus();
      if (!last) GW_RETURN_IF_ERROR(FindEnd(reader, path, sequence));
      result_.epoch = header->epoch;
      result_.bytes += kSegmentHeaderBytes;
      result_.segments.push_back({sequence, reader.end(), std::nullopt});
    } else {
      GW_ASSIGN_OR_RETURN(offset, EndAt(reader, path, sequence, 0, last, header.status()));
      if (offset < reader.end()) result_.segments.push_back({sequence, reader.end(), std::nullopt});
    }
    while (offset < reader.end()) {
      absl::StatusOr<RecordHeader> record_header = reader.HeaderAt(offset);
      absl::StatusOr<Record> record =
          record_header.ok() ? reader.BodyAt(offset, *record_header) : absl::StatusOr<Record>(record_header.status());
      if (!record.ok()) {
        GW_ASSIGN_OR_RETURN(offset, EndAt(reader, path, sequence, offset, last, record.status()));
        continue;
      }
      Segment& segment = result_.segments.back();
      segment.newest_round = std::max(segment.newest_round.value_or(0), record->round);
      GW_RETURN_IF_ERROR(visit_(*std::move(record)));
      const uint64_t bytes = kRecordHeaderBytes + record_header->body_bytes;
      offset += bytes;
      result_.bytes += bytes;
      ++result_.records;
    }
    // A writer that was killed may have left records that only the system's memory holds. They are gone on from: from
    // now on they have to survive a loss of power. A torn tail was cut off and synced just now.
    if (!last || !repair_ || !header.ok() || result_.torn_bytes > 0) return absl::OkStatus();
    return disk_.Truncate(path, reader.end());
  }

  // False: damage, and it was told.
  absl::StatusOr<bool> CheckHeader(const std::string& path, const SegmentHeader& header) const {
    if (header.identity != identity_) {
      const std::string what =
          absl::StrFormat("the journal of job digest %016x, shard map %016x, shard %d; expected %016x, %016x, %d",
                          header.identity.job_digest, header.identity.layout_digest, header.identity.shard,
                          identity_.job_digest, identity_.layout_digest, identity_.shard);
      if (damaged_ == nullptr) return absl::FailedPreconditionError(absl::StrFormat("'%s' is %s", path, what));
      GW_RETURN_IF_ERROR(Found(path, 0, what));
      return false;
    }
    if (header.epoch >= result_.epoch) return true;
    GW_RETURN_IF_ERROR(Found(path, 0, absl::StrFormat("server epoch %d follows %d", header.epoch, result_.epoch)));
    return false;
  }

  // What the next segment says of this one's length.
  absl::Status FindEnd(SegmentReader& reader, const std::string& path, uint64_t sequence) {
    const std::string next_path = SegmentPath(directory_, sequence + 1);
    const absl::StatusOr<std::unique_ptr<ReadFile>> next = disk_.Open(next_path);
    if (absl::IsNotFound(next.status())) {
      // Run tells of it, too.
      return damaged_ != nullptr ? absl::OkStatus() : Found(next_path, 0, "the file is missing");
    }
    GW_RETURN_IF_ERROR(next.status());
    const absl::StatusOr<SegmentHeader> header = SegmentReader(next->get(), sequence + 1).Header();
    // Without a header nothing was ever written behind it; if that is damage, its own turn will tell.
    if (!header.ok()) return IsContentError(header.status()) ? absl::OkStatus() : header.status();
    if (header->previous_bytes > reader.end()) {
      return Found(path, reader.end(), absl::StrFormat("%d bytes are missing", header->previous_bytes - reader.end()));
    }
    reader.set_end(header->previous_bytes);
    return absl::OkStatus();
  }

  // The bytes from `offset` on cannot be read. Returns where to go on, at most the reader's end.
  absl::StatusOr<uint64_t> EndAt(SegmentReader& reader, const std::string& path, uint64_t sequence, uint64_t offset,
                                 bool last, const absl::Status& why) {
    if (!IsContentError(why)) return why;
    bool torn = last;
    if (torn) {
      GW_ASSIGN_OR_RETURN(const std::optional<uint64_t> behind, reader.Find(offset + kAlignment, offset));
      torn = !behind.has_value();
    }
    if (!torn) {
      GW_RETURN_IF_ERROR(Found(path, offset, std::string(why.message())));
      GW_ASSIGN_OR_RETURN(const std::optional<uint64_t> next, reader.Find(offset + kAlignment, 0));
      return next.value_or(reader.end());
    }
    result_.torn_bytes = reader.end() - offset;
    if (offset > 0) result_.segments.back().bytes = offset;
    if (repair_ && offset > 0) GW_RETURN_IF_ERROR(disk_.Truncate(path, offset));
    if (repair_ && offset == 0) {
      GW_RETURN_IF_ERROR(disk_.Remove(path));
      GW_RETURN_IF_ERROR(disk_.SyncDirectory(directory_));
    }
    return reader.end();
  }

  Disk& disk_;
  const std::string& directory_;
  const Identity& identity_;
  const bool repair_;
  const std::function<void(const Damage&)>* const damaged_;
  const std::function<absl::Status(Record)>& visit_;
  ReadResult result_;
};

}  // namespace

absl::StatusOr<ReadResult> ReadJournal(Disk& disk, const std::string& directory, const Identity& identity, bool repair,
                                       const std::function<absl::Status(Record)>& visit) {
  return JournalScan(disk, directory, identity, repair, nullptr, visit).Run();
}

absl::StatusOr<ReadResult> InspectJournal(Disk& disk, const std::string& directory, const Identity& identity,
                                          const std::function<void(const Damage&)>& damaged,
                                          const std::function<absl::Status(Record)>& visit) {
  return JournalScan(disk, directory, identity, /*repair=*/false, &damaged, visit).Run();
}

}  // namespace gradwire::journal

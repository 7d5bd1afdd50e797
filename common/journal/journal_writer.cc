// Segments, syncing and healing; see journal_writer.h.
#include "common/journal/journal_writer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/failpoint.h"
#include "common/base/status_macros.h"

namespace gradwire::journal {
namespace {

// What a record holds on to until it is synced.
uint64_t HeldBytes(const Record& record) {
  return kRecordHeaderBytes + TotalSize(record.chunks) + TotalSize(record.mean_chunks);
}

}  // namespace

JournalWriter::JournalWriter(Disk* disk, Options options, ReadResult found)
    : disk_(disk), options_(std::move(options)), segments_(found.segments.begin(), found.segments.end()) {}

absl::Status JournalWriter::Append(Record record) {
  unsynced_bytes_ += HeldBytes(record);
  unsynced_.push_back(std::move(record));
  GW_RETURN_IF_ERROR(status_);
  return WriteBacklog();
}

absl::Status JournalWriter::WriteBacklog() {
  while (written_ < unsynced_.size()) {
    if (file_ != nullptr && segments_.back().bytes >= options_.segment_bytes) {
      GW_FAILPOINT("journal.segment.full");
      GW_RETURN_IF_ERROR(SyncSegment());
      file_.reset();
    }
    if (file_ == nullptr) GW_RETURN_IF_ERROR(OpenSegment());
    GW_RETURN_IF_ERROR(Write(unsynced_[written_]));
    ++written_;
  }
  return absl::OkStatus();
}

absl::Status JournalWriter::Write(const Record& record) {
  Segment& segment = segments_.back();
  const EncodedRecord encoded = EncodeRecord(record, segment.sequence, synced_bytes_);
  GW_FAILPOINT("journal.record.before_write");
  if (GW_FAILPOINT_DUE("journal.record.torn")) {
    const std::vector<std::span<const uint8_t>> pieces = encoded.Pieces();
    const std::span<const uint8_t> chunk = pieces[std::min<size_t>(1, encoded.chunks.size())];
    const std::span<const uint8_t> half[] = {encoded.lead, chunk.first(chunk.size() / 2)};
    file_->Append(std::span(half).last(encoded.chunks.empty() ? 1 : 2)).IgnoreError();
    failpoint::Die();
  }
  if (absl::Status written = file_->Append(encoded.Pieces()); !written.ok()) return Fail(std::move(written));
  GW_FAILPOINT("journal.record.after_write");
  segment.bytes += encoded.bytes;
  segment.newest_round = std::max(segment.newest_round.value_or(0), record.round);
  return absl::OkStatus();
}

absl::Status JournalWriter::OpenSegment() {
  SegmentHeader header;
  header.sequence = segments_.empty() ? 1 : segments_.back().sequence + 1;
  header.epoch = options_.epoch;
  header.identity = options_.identity;
  header.previous_bytes = segments_.empty() ? 0 : segments_.back().bytes;
  const std::string path = SegmentPath(options_.directory, header.sequence);
  if (half_made_) {
    if (absl::Status removed = disk_->Remove(path); !removed.ok() && !absl::IsNotFound(removed)) return Fail(removed);
    half_made_ = false;
  }
  auto file = disk_->Create(path);
  if (absl::IsAlreadyExists(file.status())) {
    fenced_ = true;
    return Fail(absl::FailedPreconditionError(
        absl::StrFormat("'%s' exists: another server has taken over this journal; stop one of the two", path)));
  }
  if (!file.ok()) return Fail(file.status());
  half_made_ = true;
  GW_FAILPOINT("journal.segment.before_header");
  const std::vector<uint8_t> bytes = EncodeSegmentHeader(header);
  const std::span<const uint8_t> piece = bytes;
  absl::Status made = (*file)->Append({&piece, 1});
  if (made.ok()) made = (*file)->Sync();
  if (made.ok()) made = disk_->SyncDirectory(options_.directory);
  if (!made.ok()) return Fail(std::move(made));
  GW_FAILPOINT("journal.segment.after_header");
  half_made_ = false;
  file_ = *std::move(file);
  segments_.push_back({header.sequence, bytes.size(), std::nullopt});
  synced_bytes_ = bytes.size();
  return absl::OkStatus();
}

absl::Status JournalWriter::SyncSegment() {
  GW_FAILPOINT("journal.sync.before");
  if (absl::Status synced = file_->Sync(); !synced.ok()) {
    sync_failed_ = true;
    return Fail(std::move(synced));
  }
  GW_FAILPOINT("journal.sync.after");
  NoteSynced();
  return absl::OkStatus();
}

void JournalWriter::NoteSynced() {
  synced_bytes_ = segments_.back().bytes;
  for (; written_ > 0; --written_) {
    const Record& record = unsynced_.front();
    if (record.bucket >= durable_versions_.size()) durable_versions_.resize(record.bucket + 1);
    durable_versions_[record.bucket] = std::max(durable_versions_[record.bucket], VersionOf(record));
    unsynced_bytes_ -= HeldBytes(record);
    unsynced_.pop_front();
  }
}

absl::Status JournalWriter::Sync() {
  GW_RETURN_IF_ERROR(status_);
  return written_ == 0 ? absl::OkStatus() : SyncSegment();
}

absl::Status JournalWriter::Heal() {
  if (status_.ok() || fenced_) return status_;
  if (file_ != nullptr) {
    // What a failed sync left may be there or not, whatever the disk says from now on: it is cut off and written anew.
    // Before a write that failed there are whole records, which may have been seen: they stay, and are synced by this.
    const uint64_t kept = sync_failed_ ? synced_bytes_ : segments_.back().bytes;
    if (absl::Status cut = disk_->Truncate(SegmentPath(options_.directory, segments_.back().sequence), kept);
        !cut.ok()) {
      sync_failed_ = true;
      return cut;
    }
    segments_.back().bytes = kept;
    if (sync_failed_) {
      written_ = 0;
    } else {
      NoteSynced();
    }
    sync_failed_ = false;
    file_.reset();
  }
  status_ = absl::OkStatus();
  GW_RETURN_IF_ERROR(WriteBacklog());
  return Sync();
}

void JournalWriter::DropBacklog() {
  unsynced_.clear();
  written_ = 0;
  unsynced_bytes_ = 0;
}

absl::Status JournalWriter::Cut(uint64_t round) {
  while (segments_.size() > 1 && segments_.front().newest_round.value_or(0) < round) {
    const absl::Status gone = disk_->Remove(SegmentPath(options_.directory, segments_.front().sequence));
    if (!gone.ok() && !absl::IsNotFound(gone)) return gone;
    segments_.pop_front();
    GW_FAILPOINT("journal.cut.between");
    // One by one: after a loss of power there may be fewer segments, but never a hole.
    GW_RETURN_IF_ERROR(disk_->SyncDirectory(options_.directory));
  }
  return absl::OkStatus();
}

uint64_t JournalWriter::backlog_end() const {
  uint64_t end = 0;
  for (const Record& record : unsynced_) end = std::max(end, VersionOf(record));
  return end;
}

uint64_t JournalWriter::bytes() const {
  uint64_t bytes = 0;
  for (const Segment& segment : segments_) bytes += segment.bytes;
  return bytes;
}

absl::Status JournalWriter::Fail(absl::Status status) {
  if (status_.ok()) status_ = std::move(status);
  return status_;
}

}  // namespace gradwire::journal

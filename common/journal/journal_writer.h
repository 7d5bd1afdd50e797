// Appends records to segment files, and keeps what is not on disk yet until it is: no threads, no clock.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/journal/journal_reader.h"
#include "common/journal/record.h"
#include "common/journal/segments.h"
#include "common/storage/disk.h"

namespace gradwire::journal {

// Not thread-safe. After an error the journal has failed: records are kept in memory, in order, until Heal succeeds or
// the backlog is dropped. Nothing that was synced is ever written to again.
class JournalWriter {
 public:
  struct Options {
    std::string directory;
    Identity identity;
    uint64_t epoch = 0;
    // A segment that has grown this long is followed by another one.
    uint64_t segment_bytes = 64u << 20;
  };

  // `found`: what ReadJournal found, with repair. The disk outlives the writer.
  JournalWriter(Disk* disk, Options options, ReadResult found);

  // Writes a record behind the others. When it returns ok the record survives the process, after Sync also a loss of
  // power. Otherwise it waits in the backlog.
  absl::Status Append(Record record);
  // Everything appended so far is on disk when it returns ok.
  absl::Status Sync();
  // Tries to get well: cuts the failed segment to its last whole record (after a failed sync: to what was synced before
  // it), writes the rest of the backlog to a new one, syncs. Ok without work where nothing failed. A journal that
  // another server has taken over does not heal.
  absl::Status Heal();
  // Forgets the records that are not on disk: the journal has a hole that only a snapshot behind them can close.
  void DropBacklog();
  // Removes old segments whose records are all of rounds before `round`. Errors leave some of them for the next call.
  absl::Status Cut(uint64_t round);

  const absl::Status& status() const { return status_; }  // not ok: failed
  bool fenced() const { return fenced_; }                 // another server has taken the journal over
  uint64_t unsynced_bytes() const { return unsynced_bytes_; }
  // The version behind the latest record that is not on disk; 0 where all are.
  uint64_t backlog_end() const;
  // Versions of bucket b up to durable_versions()[b] can be recovered. Grows on demand; absent: 0.
  const std::vector<uint64_t>& durable_versions() const { return durable_versions_; }
  const std::deque<Segment>& segments() const { return segments_; }
  uint64_t bytes() const;  // of all segments

 private:
  // Writes what of the backlog is not written yet.
  absl::Status WriteBacklog();
  absl::Status Write(const Record& record);
  absl::Status OpenSegment();
  // Of the open segment; what was written is no longer in the backlog then.
  absl::Status SyncSegment();
  void NoteSynced();
  // Remembers the first failure; returns it.
  absl::Status Fail(absl::Status status);

  Disk* const disk_;
  const Options options_;
  std::deque<Segment> segments_;  // the last one is open while file_ is set
  std::unique_ptr<AppendFile> file_;
  uint64_t synced_bytes_ = 0;  // of the open segment
  bool sync_failed_ = false;   // of the open segment, since it was opened
  bool half_made_ = false;     // the next segment's file may exist, made by this writer
  bool fenced_ = false;
  absl::Status status_;
  std::deque<Record> unsynced_;  // in order
  size_t written_ = 0;           // of unsynced_: they are in the open segment
  uint64_t unsynced_bytes_ = 0;
  std::vector<uint64_t> durable_versions_;
};

}  // namespace gradwire::journal

// Which versions of a shard can be made from its journal, without making them.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "common/journal/record.h"

namespace gradwire {

// Not thread-safe. Sees every record of a journal once, in order.
class JournalReach {
 public:
  explicit JournalReach(uint32_t buckets) : updates_(buckets), incarnations_(buckets), states_(buckets) {}

  // A record of a bucket that the job does not have is passed over.
  void Note(const journal::Record& record);

  struct Range {
    uint64_t first = 0;
    uint64_t last = 0;
  };
  // The versions that the journal makes by itself: it has initial parameters of every bucket, from one worker, or the
  // state of every bucket. Nothing: it needs a snapshot.
  std::optional<Range> Alone() const;
  // The newest version that all buckets come to from `version` on, without a gap; at least `version`.
  uint64_t From(uint64_t version) const;
  // The newest version that all buckets have passed once a server has replayed the journal from these versions of them
  // on, one each: a record of a bucket's state takes it over a gap, as of a standby that was copied to once more.
  uint64_t ReplayedFrom(const std::vector<uint64_t>& versions) const;
  // The newest version that any bucket has a record of; 0: none has.
  uint64_t newest() const { return newest_; }
  // Of the updates; nothing: there are none.
  std::optional<uint64_t> oldest_round() const { return oldest_round_; }

 private:
  uint64_t EndOf(size_t bucket, uint64_t version) const;

  // By bucket: updates that follow each other, first round and the version behind the last one, in order.
  std::vector<std::vector<std::pair<uint64_t, uint64_t>>> updates_;
  std::vector<std::optional<uint64_t>> incarnations_;  // of the initial parameters
  std::vector<std::optional<uint64_t>> states_;        // the latest version of which there is the whole state
  uint64_t newest_ = 0;
  std::optional<uint64_t> oldest_round_;
};

}  // namespace gradwire

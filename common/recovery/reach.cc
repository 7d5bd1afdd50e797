// See reach.h.
#include "common/recovery/reach.h"

#include <algorithm>

#include "common/wire/frame.h"

namespace gradwire {

void JournalReach::Note(const journal::Record& record) {
  if (record.bucket >= updates_.size()) return;
  if (record.type == journal::RecordType::kInitial) {
    const auto header = wire::ParseHeader(record.chunks[0].span());
    if (header.ok()) incarnations_[record.bucket] = header->incarnation;
    return;
  }
  auto& updates = updates_[record.bucket];
  if (updates.empty() || updates.back().second != record.round) updates.emplace_back(record.round, record.round);
  updates.back().second = record.round + 1;
  newest_ = std::max(newest_, record.round + 1);
  oldest_round_ = std::min(oldest_round_.value_or(record.round), record.round);
}

bool JournalReach::initial() const {
  return std::all_of(incarnations_.begin(), incarnations_.end(),
                     [this](const auto& i) { return i.has_value() && *i == *incarnations_[0]; });
}

uint64_t JournalReach::From(uint64_t version) const {
  uint64_t least = UINT64_MAX;
  for (const auto& updates : updates_) {
    uint64_t end = version;
    for (const auto& [begin, behind] : updates) {
      if (begin <= end && end < behind) end = behind;
    }
    least = std::min(least, end);
  }
  return updates_.empty() ? version : least;
}

}  // namespace gradwire

// See reach.h.
#include "common/recovery/reach.h"

#include <algorithm>

#include "common/wire/frame.h"

namespace gradwire {

void JournalReach::Note(const journal::Record& record) {
  if (record.bucket >= updates_.size() || record.type == journal::RecordType::kKept) return;
  if (record.type == journal::RecordType::kInitial) {
    const auto header = wire::ParseHeader(record.chunks[0].span());
    if (header.ok()) incarnations_[record.bucket] = header->incarnation;
    return;
  }
  if (record.type == journal::RecordType::kState) {
    states_[record.bucket] = std::max(states_[record.bucket].value_or(0), record.round);
    newest_ = std::max(newest_, record.round);
    return;
  }
  auto& updates = updates_[record.bucket];
  if (updates.empty() || updates.back().second != record.round) updates.emplace_back(record.round, record.round);
  updates.back().second = record.round + 1;
  newest_ = std::max(newest_, record.round + 1);
  oldest_round_ = std::min(oldest_round_.value_or(record.round), record.round);
}

std::optional<JournalReach::Range> JournalReach::Alone() const {
  const auto known = [](const auto& value) { return value.has_value(); };
  const bool states = std::all_of(states_.begin(), states_.end(), known);
  const bool initial = std::all_of(incarnations_.begin(), incarnations_.end(),
                                   [this](const auto& i) { return i.has_value() && i == incarnations_[0]; });
  if (!states && !initial) return std::nullopt;
  Range range{0, UINT64_MAX};
  for (size_t b = 0; b < updates_.size(); ++b) {
    const uint64_t version = states ? *states_[b] : 0;
    range.first = std::max(range.first, version);
    range.last = std::min(range.last, EndOf(b, version));
  }
  if (updates_.empty() || range.last < range.first) return std::nullopt;
  return range;
}

uint64_t JournalReach::EndOf(size_t bucket, uint64_t version) const {
  for (const auto& [begin, behind] : updates_[bucket]) {
    if (begin <= version && version < behind) version = behind;
  }
  return version;
}

uint64_t JournalReach::From(uint64_t version) const {
  uint64_t least = UINT64_MAX;
  for (size_t b = 0; b < updates_.size(); ++b) least = std::min(least, EndOf(b, version));
  return updates_.empty() ? version : least;
}

uint64_t JournalReach::ReplayedFrom(const std::vector<uint64_t>& versions) const {
  uint64_t least = UINT64_MAX;
  for (size_t b = 0; b < updates_.size(); ++b) {
    uint64_t end = EndOf(b, versions[b]);
    if (states_[b] && *states_[b] > end) end = EndOf(b, *states_[b]);
    least = std::min(least, end);
  }
  return least;
}

}  // namespace gradwire

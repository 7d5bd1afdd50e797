// See push_history.h.
#include "server/rounds/push_history.h"

#include <algorithm>

namespace gradwire {

void PushHistory::Note(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest) {
  Entries& entries = entries_[id];
  if (entries.empty()) entries.resize(size_t{buckets_} * depth_);
  const auto latest = entries.begin() + static_cast<std::ptrdiff_t>(size_t{bucket} * depth_);
  std::copy_backward(latest, latest + depth_ - 1, latest + depth_);
  *latest = {round, digest, true};
}

const uint32_t* PushHistory::Find(MemberId id, uint32_t bucket, uint64_t round) const {
  const auto it = entries_.find(id);
  if (it == entries_.end()) return nullptr;
  for (size_t i = size_t{bucket} * depth_; i < size_t{bucket + 1} * depth_; ++i) {
    const Entry& entry = it->second[i];
    if (entry.used && entry.round == round) return &entry.digest;
  }
  return nullptr;
}

bool PushHistory::IsLastOfAny(uint32_t bucket, uint64_t round) const {
  return std::any_of(entries_.begin(), entries_.end(), [&](const auto& known) {
    const Entry& latest = known.second[size_t{bucket} * depth_];
    return latest.used && latest.round == round;
  });
}

void PushHistory::Depart(MemberId id) {
  if (!entries_.contains(id)) return;
  departed_.push_back(id);
  if (departed_.size() <= kDeparted) return;
  const auto oldest = entries_.find(departed_.front());
  for (const Entry& entry : oldest->second) {
    if (entry.used) Forget(entry.round + 1);
  }
  entries_.erase(oldest);
  departed_.pop_front();
}

void PushHistory::Return(MemberId id) { std::erase(departed_, id); }

void PushHistory::Drop(MemberId id) {
  Return(id);
  entries_.erase(id);
}

}  // namespace gradwire

// See push_history.h.
#include "server/rounds/push_history.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_format.h"

namespace gradwire {

void PushHistory::Begin(MemberId id) {
  std::vector<Entry>& last = entries_[id].last;
  if (last.empty()) last.resize(size_t{buckets_} * depth_);
}

void PushHistory::Note(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest) {
  Begin(id);
  const auto latest = entries_[id].last.begin() + static_cast<std::ptrdiff_t>(size_t{bucket} * depth_);
  std::copy_backward(latest, latest + depth_ - 1, latest + depth_);
  *latest = {round, digest, true};
}

void PushHistory::Restore(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest) {
  Begin(id);
  const auto latest = entries_[id].last.begin() + static_cast<std::ptrdiff_t>(size_t{bucket} * depth_);
  const auto at =
      std::find_if(latest, latest + depth_, [round](const Entry& e) { return !e.used || e.round <= round; });
  if (at != latest + depth_ && !(at->used && at->round == round)) {
    std::copy_backward(at, latest + depth_ - 1, latest + depth_);
    *at = {round, digest, true};
  }
  Depart(id);
}

const uint32_t* PushHistory::Find(MemberId id, uint32_t bucket, uint64_t round) const {
  const auto it = entries_.find(id);
  if (it == entries_.end()) return nullptr;
  for (size_t i = size_t{bucket} * depth_; i < size_t{bucket + 1} * depth_; ++i) {
    const Entry& entry = it->second.last[i];
    if (entry.used && entry.round == round) return &entry.digest;
  }
  return nullptr;
}

absl::Status PushHistory::CheckSame(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest) const {
  const uint32_t* seen = Find(id, bucket, round);
  if (seen == nullptr || *seen == digest) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrFormat("bucket %d round %d: a frame with digest 0x%08x of this worker was merged before, this one has "
                      "0x%08x: a repeat must be the same bytes",
                      bucket, round, *seen, digest));
}

std::vector<PushHistory::Merged> PushHistory::Of(uint32_t bucket) const {
  std::vector<Merged> merged;
  for (const auto& [id, entries] : entries_) {
    for (uint32_t age = depth_; age-- > 0;) {
      const Entry& entry = entries.last[size_t{bucket} * depth_ + age];
      if (entry.used) merged.push_back({id, entry.round, entry.digest});
    }
  }
  return merged;
}

bool PushHistory::MayMissUpdate(uint32_t bucket, uint64_t round) const {
  return std::any_of(entries_.begin(), entries_.end(), [&](const auto& known) {
    const auto latest = known.second.last.begin() + static_cast<std::ptrdiff_t>(size_t{bucket} * depth_);
    return std::any_of(latest, latest + depth_ - 1, [&](const Entry& e) { return e.used && e.round == round; });
  });
}

void PushHistory::Depart(MemberId id) {
  if (!entries_.contains(id)) return;
  Return(id);
  departed_.push_back(id);
  if (departed_.size() <= departed_limit_) return;
  const auto oldest = entries_.find(departed_.front());
  for (const Entry& entry : oldest->second.last) {
    if (entry.used) Forget(entry.round + 1);
  }
  entries_.erase(oldest);
  departed_.pop_front();
}

void PushHistory::ForgetAll(uint64_t round) {
  Forget(round);
  for (auto it = entries_.begin(); it != entries_.end();) {
    bool any = false;
    for (Entry& entry : it->second.last) {
      if (entry.round < round) entry = {};
      any = any || entry.used;
    }
    it->second.from = std::max(it->second.from, round);
    if (!any) std::erase(departed_, it->first);
    it = any ? std::next(it) : entries_.erase(it);
  }
}

void PushHistory::Return(MemberId id) { std::erase(departed_, id); }

void PushHistory::Drop(MemberId id) {
  Return(id);
  entries_.erase(id);
}

}  // namespace gradwire

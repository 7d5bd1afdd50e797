// What every incarnation has contributed lately, also of those that are away: how a frame that is sent again is told
// from one that was never merged. Pure, like the rounds it serves.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "absl/status/status.h"
#include "server/rounds/membership.h"

namespace gradwire {

// A worker sends the frames of a bucket in the order of their rounds and keeps at most depth - 1 of them unanswered, so
// the last `depth` that were merged are all it may ask for. Bounded: `depth` entries per bucket of every member and of
// the last kDeparted incarnations (or more, see the constructor) that went away.
class PushHistory {
 public:
  static constexpr size_t kDeparted = 64;

  struct Merged {
    MemberId id = 0;
    uint64_t round = 0;
    uint32_t digest = 0;
  };

  // `departed`: how many of those that went away are kept, if more than kDeparted.
  PushHistory(uint32_t buckets, uint32_t depth, size_t departed = 0)
      : buckets_(buckets), depth_(depth), departed_limit_(std::max(departed, kDeparted)) {}

  // A frame was merged.
  void Note(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest);
  // The same, read from a record: nobody is a member yet, and a journal, and more so what a standby is sent, names ever
  // more incarnations. In any order, and more than once.
  void Restore(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest);
  // Its digest; null: it is not known to be merged.
  const uint32_t* Find(MemberId id, uint32_t bucket, uint64_t round) const;
  // FailedPrecondition: it was merged with another digest.
  absl::Status CheckSame(MemberId id, uint32_t bucket, uint64_t round, uint32_t digest) const;
  // All that is known of a bucket, in an order in which it can be noted again.
  std::vector<Merged> Of(uint32_t bucket) const;
  // False: what this incarnation contributed to `round` may be forgotten.
  bool Knows(MemberId id, uint64_t round) const {
    const auto it = entries_.find(id);
    return it == entries_.end() ? round >= forgotten_ : round >= it->second.from;
  }
  // Of some incarnation, one of the last frames in `bucket`, as many as may be unanswered, is of `round`: it may not
  // have read the update.
  bool MayMissUpdate(uint32_t bucket, uint64_t round) const;

  // At most, with `members` workers at once.
  static uint64_t MaxBytes(uint64_t buckets, uint64_t depth, uint64_t members) {
    constexpr uint64_t kOfOne = 128;  // nodes and headers
    const uint64_t incarnations = members + std::max<uint64_t>(members, kDeparted) + 1;
    return incarnations * (kOfOne + buckets * depth * sizeof(Entry));
  }
  size_t incarnations() const { return entries_.size(); }  // of which anything is known

  void Begin(MemberId id);   // it has contributed nothing so far, if it is not known
  void Depart(MemberId id);  // it may come back; the latest one, also where it was away before
  void Return(MemberId id);
  void Drop(MemberId id);  // it never comes back
  // What was before `round` is not known of anybody who is not known.
  void Forget(uint64_t round) { forgotten_ = std::max(forgotten_, round); }
  // What was before `round` is not known of anybody who is known so far either.
  void ForgetAll(uint64_t round);

 private:
  struct Entry {
    uint64_t round = 0;
    uint32_t digest = 0;
    bool used = false;
  };
  struct Entries {
    std::vector<Entry> last;  // [bucket * depth + age], the latest first
    uint64_t from = 0;        // whether it contributed to earlier rounds is not known
  };

  const uint32_t buckets_;
  const uint32_t depth_;
  const size_t departed_limit_;
  std::map<MemberId, Entries> entries_;
  std::deque<MemberId> departed_;  // the longest away first
  uint64_t forgotten_ = 0;
};

}  // namespace gradwire

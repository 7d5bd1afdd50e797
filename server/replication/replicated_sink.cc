// See replicated_sink.h.
#include "server/replication/replicated_sink.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/replication/record_pieces.h"

namespace gradwire {
namespace {

// Rounds begin to wait for a standby once it is this close.
constexpr uint64_t kRecordsPerBucketBehind = 2;

template <typename T>
T& At(std::vector<T>& list, size_t index) {
  if (index >= list.size()) list.resize(index + 1);
  return list[index];
}

}  // namespace

ReplicatedSink::ReplicatedSink(std::unique_ptr<UpdateSink> journal, Clock* clock, ReplicationHooks hooks)
    : journal_(std::move(journal)), clock_(clock), hooks_(std::move(hooks)), following_(hooks_.following) {}

ReplicatedSink::~ReplicatedSink() { Stop(); }

void ReplicatedSink::Append(journal::Record record, std::function<void()> visible) {
  const uint32_t bucket = record.bucket;
  if (record.type != journal::RecordType::kUpdate) {
    const bool initial = record.type == journal::RecordType::kInitial;
    return journal_->Append(std::move(record), [this, initial, visible = std::move(visible)] {
      CallAll({visible});
      if (initial) hooks_.changed();
    });
  }
  const uint64_t version = record.round + 1;
  bool first = false;
  {
    absl::MutexLock lock(&mu_);
    if (over_) return;
    first = hooks_.lost_sync && !following_ && !std::exchange(begun_, true);
    losses_ += first;
    At(buckets_, bucket).pending.push_back({version, clock_->Now(), false, std::move(visible)});
    for (Tap& tap : taps_) {
      At(tap.given, bucket) = version + 1;
      tap.follower->Enqueue(record);
    }
    if (keeps_recent_) KeepRecent(record);
  }
  journal_->Append(std::move(record), [this, bucket, version, first] {
    if (first) hooks_.lost_sync();
    Journaled(bucket, version);
  });
}

void ReplicatedSink::KeepRecent(const journal::Record& record) {
  recent_.push_back(record);
  recent_bytes_ += HeldBytes(record);
  while (recent_bytes_ > kRecentBytes) {
    recent_bytes_ -= HeldBytes(recent_.front());
    recent_.pop_front();
  }
}

std::vector<journal::Record> ReplicatedSink::Made(uint64_t history, const std::vector<CopyPosition>& copy) const {
  std::vector<journal::Record> made;
  if (over_ || history != hooks_.history || copy.size() < buckets_.size()) return made;
  for (const journal::Record& record : recent_) {
    if (record.round + 1 == copy[record.bucket].version) made.push_back(record);
  }
  return made;
}

bool ReplicatedSink::GoOn(RecordFollower* follower, uint64_t history, const std::vector<CopyPosition>& copy) {
  std::vector<journal::Record> made;
  {
    absl::MutexLock lock(&mu_);
    made = Made(history, copy);
  }
  const bool same = !made.empty() && made.size() == copy.size() &&
                    std::all_of(made.begin(), made.end(),
                                [&](const auto& record) { return DigestOf(record) == copy[record.bucket].digest; });
  absl::MutexLock lock(&mu_);
  // Where those are still here, so is what came later.
  if (!same || Made(history, copy).size() < copy.size()) return false;
  Tap tap;
  tap.follower = follower;
  tap.states_given = true;
  tap.taken.resize(copy.size());  // it says itself what it has taken
  for (const CopyPosition& position : copy) tap.given.push_back(position.version + 1);
  for (const journal::Record& record : recent_) {
    if (record.round < copy[record.bucket].version) continue;
    tap.given[record.bucket] = record.round + 2;
    follower->Enqueue(record);
  }
  taps_.push_back(std::move(tap));
  return true;
}

void ReplicatedSink::Journaled(uint32_t bucket, uint64_t version) {
  std::vector<Visible> ready;
  {
    absl::MutexLock lock(&mu_);
    for (Pending& pending : buckets_[bucket].pending) {
      if (pending.version != version || pending.journaled) continue;
      pending.journaled = true;
      break;
    }
    TakeReady(bucket, &ready);
  }
  CallAll(ready);
}

void ReplicatedSink::TakeReady(uint32_t index, std::vector<Visible>* ready) {
  if (index >= buckets_.size() || losses_ > forgiven_) return;
  if (clock_->Now() >= *hooks_.serve_until) return;
  Bucket& bucket = buckets_[index];
  const auto taken_by_all = [&](uint64_t version) ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return std::all_of(taps_.begin(), taps_.end(), [&](const Tap& tap) {
      return !tap.waited_for || (index < tap.taken.size() && tap.taken[index] > version);
    });
  };
  while (!bucket.pending.empty() && bucket.pending.front().journaled && taken_by_all(bucket.pending.front().version)) {
    bucket.visible = std::max(bucket.visible, bucket.pending.front().version);
    ready->push_back(std::move(bucket.pending.front().visible));
    bucket.pending.pop_front();
  }
}

void ReplicatedSink::CallAll(const std::vector<Visible>& ready) {
  if (ready.empty()) return;
  {
    absl::MutexLock lock(&mu_);
    if (over_) return;
    ++calling_;
  }
  for (const Visible& visible : ready) visible();
  absl::MutexLock lock(&mu_);
  --calling_;
}

void ReplicatedSink::Stop() {
  journal_->Stop();
  Fence();
}

void ReplicatedSink::Serve(bool has_parameters) {
  absl::MutexLock lock(&mu_);
  following_ = false;
  begun_ = has_parameters;
}

void ReplicatedSink::Fence() {
  absl::MutexLock lock(&mu_);
  over_ = true;
  recent_.clear();
  mu_.Await(absl::Condition(
      +[](int* calling) { return *calling == 0; }, &calling_));
}

void ReplicatedSink::Resume() {
  std::vector<Visible> ready;
  {
    absl::MutexLock lock(&mu_);
    for (uint32_t b = 0; b < buckets_.size(); ++b) TakeReady(b, &ready);
  }
  CallAll(ready);
}

journal::JournalStatus ReplicatedSink::status() const {
  journal::JournalStatus status = journal_->status();
  absl::MutexLock lock(&mu_);
  for (const Tap& tap : taps_) {
    const auto least = std::min_element(tap.taken.begin(), tap.taken.end());
    const uint64_t taken = least == tap.taken.end() || *least == 0 ? 0 : *least - 1;
    status.followers.push_back({tap.follower->name(), taken, tap.in_sync});
  }
  return status;
}

ReplicatedSink::Tap* ReplicatedSink::TapOf(const RecordFollower* follower) {
  const auto it =
      std::find_if(taps_.begin(), taps_.end(), [follower](const Tap& tap) { return tap.follower == follower; });
  return it == taps_.end() ? nullptr : &*it;
}

const ReplicatedSink::Tap* ReplicatedSink::TapOf(const RecordFollower* follower) const {
  return const_cast<ReplicatedSink*>(this)->TapOf(follower);
}

void ReplicatedSink::Attach(RecordFollower* follower) {
  absl::MutexLock lock(&mu_);
  Tap tap;
  tap.follower = follower;
  taps_.push_back(std::move(tap));
  keeps_recent_ = true;
}

void ReplicatedSink::GiveState(RecordFollower* follower, uint32_t bucket, uint64_t version) {
  absl::MutexLock lock(&mu_);
  Tap* tap = TapOf(follower);
  if (tap == nullptr) return;
  At(tap->given, bucket) = std::max(At(tap->given, bucket), version + 1);
  At(tap->taken, bucket);
}

void ReplicatedSink::StatesGiven(RecordFollower* follower) {
  absl::MutexLock lock(&mu_);
  Tap* tap = TapOf(follower);
  if (tap == nullptr) return;
  tap->states_given = true;
  Judge(*tap);
}

void ReplicatedSink::Detach(RecordFollower* follower) {
  std::vector<Visible> ready;
  bool lost = false;
  {
    absl::MutexLock lock(&mu_);
    const Tap* tap = TapOf(follower);
    lost = tap != nullptr && tap->in_sync && hooks_.lost_sync && !over_;
    losses_ += lost;
    std::erase_if(taps_, [follower](const Tap& tap) { return tap.follower == follower; });
    for (uint32_t b = 0; b < buckets_.size(); ++b) TakeReady(b, &ready);
  }
  CallAll(ready);
  if (lost) hooks_.lost_sync();
}

uint64_t ReplicatedSink::losses() const {
  absl::MutexLock lock(&mu_);
  return losses_;
}

void ReplicatedSink::Forgive(uint64_t losses) {
  {
    absl::MutexLock lock(&mu_);
    forgiven_ = std::max(forgiven_, losses);
  }
  Resume();
}

absl::StatusOr<bool> ReplicatedSink::Take(RecordFollower* follower, uint32_t bucket, uint64_t version) {
  std::vector<Visible> ready;
  bool came = false;
  {
    absl::MutexLock lock(&mu_);
    Tap* tap = TapOf(follower);
    if (tap == nullptr) return false;
    if (bucket >= tap->given.size() || version >= tap->given[bucket]) {
      return absl::InvalidArgumentError(
          absl::StrFormat("version %d of bucket %d was taken, but never given", version, bucket));
    }
    At(tap->taken, bucket) = std::max(At(tap->taken, bucket), version + 1);
    const bool was = tap->in_sync;
    Judge(*tap);
    came = tap->in_sync && !was;
    TakeReady(bucket, &ready);
  }
  CallAll(ready);
  return came;
}

void ReplicatedSink::Judge(Tap& tap) {
  if (!tap.states_given || tap.in_sync) return;
  uint64_t behind = 0;
  bool has_all_seen = true;
  bool has_begun = true;  // it may never take anything
  for (uint32_t b = 0; b < tap.given.size(); ++b) {
    behind += tap.given[b] - At(tap.taken, b);
    const uint64_t seen = b < buckets_.size() ? buckets_[b].visible : 0;
    has_all_seen = has_all_seen && tap.taken[b] > seen;
    has_begun = has_begun && tap.taken[b] > 0;
  }
  // From here on nothing becomes visible that it does not have, so it catches up with what is.
  const bool close = behind <= kRecordsPerBucketBehind * tap.given.size();
  tap.waited_for = tap.waited_for || (close && has_begun && tap.follower->MayBeWaitedFor());
  tap.in_sync = tap.waited_for && has_all_seen;
}

bool ReplicatedSink::InSync(const RecordFollower* follower) const {
  absl::MutexLock lock(&mu_);
  const Tap* tap = TapOf(follower);
  return tap != nullptr && tap->in_sync;
}

bool ReplicatedSink::Reconsider(RecordFollower* follower) {
  absl::MutexLock lock(&mu_);
  Tap* tap = TapOf(follower);
  if (tap == nullptr || tap->in_sync) return false;
  Judge(*tap);
  return tap->in_sync;
}

bool ReplicatedSink::WaitedFor(const RecordFollower* follower) const {
  absl::MutexLock lock(&mu_);
  const Tap* tap = TapOf(follower);
  return tap != nullptr && tap->waited_for;
}

std::optional<TimeNs> ReplicatedSink::WaitingSince(const RecordFollower* follower) const {
  absl::MutexLock lock(&mu_);
  const Tap* tap = TapOf(follower);
  std::optional<TimeNs> since;
  if (tap == nullptr || !tap->waited_for) return since;
  for (uint32_t b = 0; b < buckets_.size(); ++b) {
    for (const Pending& pending : buckets_[b].pending) {
      const bool taken = b < tap->taken.size() && tap->taken[b] > pending.version;
      if (!taken && (!since || pending.appended < *since)) since = pending.appended;
    }
  }
  return since;
}

}  // namespace gradwire

// See recorder.h.
#include "common/trace/recorder.h"

#include <unistd.h>

#include <algorithm>

namespace gradwire {

v1::TraceEvent ToProto(const TraceNote& note) {
  v1::TraceEvent event;
  event.set_stage(note.subject.stage);
  event.set_round(note.subject.round);
  event.set_bucket(note.subject.bucket);
  event.set_shard(note.subject.shard);
  event.set_member(note.subject.member);
  event.set_bytes(note.subject.bytes);
  event.set_begin_ns(note.begin_ns);
  event.set_end_ns(note.end_ns);
  event.set_thread(note.thread);
  return event;
}

void TraceRecorder::Record(uint64_t first_round, uint64_t rounds) {
  absl::MutexLock lock(&mu_);
  if (first_.load(std::memory_order_relaxed) == first_round && rounds_.load(std::memory_order_relaxed) == rounds)
    return;
  notes_.reserve(kMaxNotes);  // before anything is asked for: the threads that note it must not fail
  notes_.clear();
  dropped_ = 0;
  rounds_.store(0, std::memory_order_relaxed);
  first_.store(first_round, std::memory_order_relaxed);
  rounds_.store(rounds, std::memory_order_relaxed);
}

void TraceRecorder::Note(const TraceSubject& subject, TimeNs begin_ns, TimeNs end_ns) {
  const auto thread = static_cast<uint64_t>(gettid());
  absl::MutexLock lock(&mu_);
  if (!Wants(subject.round)) return;
  if (notes_.size() == kMaxNotes) {
    ++dropped_;
    return;
  }
  notes_.push_back({subject, begin_ns, end_ns, thread});
}

TraceRecorder::Page TraceRecorder::Read(uint64_t from, size_t limit) const {
  absl::MutexLock lock(&mu_);
  Page page;
  page.total = notes_.size();
  page.dropped = dropped_;
  page.first_round = first_.load(std::memory_order_relaxed);
  page.rounds = rounds_.load(std::memory_order_relaxed);
  const auto begin = notes_.begin() + static_cast<ptrdiff_t>(std::min<uint64_t>(from, notes_.size()));
  const auto end = begin + std::min<ptrdiff_t>(static_cast<ptrdiff_t>(limit), notes_.end() - begin);
  page.notes.assign(begin, end);
  return page;
}

}  // namespace gradwire

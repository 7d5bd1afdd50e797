// Notes what one process does in some rounds of one job, and when. Off until it is asked; then a bucket costs some
// clock reads and short locks, which is why only some rounds are noted.
//
//   where the work is done -> Span, Note -> TraceRecorder -> Read -> a page of ReadTrace, or ChromeTrace
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/base/clock.h"
#include "gradwire/v1/trace.pb.h"

namespace gradwire {

// What an event is about.
struct TraceSubject {
  v1::TraceStage stage = v1::TRACE_UNSPECIFIED;
  uint64_t round = 0;
  uint32_t bucket = 0;  // or the tensor, see TraceStage
  uint32_t shard = 0;
  uint64_t member = 0;
  uint64_t bytes = 0;
};

struct TraceNote {
  TraceSubject subject;
  TimeNs begin_ns = 0;
  TimeNs end_ns = 0;
  uint64_t thread = 0;  // the system's number of it
};

v1::TraceEvent ToProto(const TraceNote& note);

// Thread-safe. Its mutex is innermost. Off, it costs one relaxed load for each event.
class TraceRecorder {
 public:
  static constexpr size_t kMaxNotes = 32768;
  static constexpr uint64_t kMaxBytes = kMaxNotes * sizeof(TraceNote);

  // What there is of notes, from one on.
  struct Page {
    std::vector<TraceNote> notes;
    uint64_t total = 0;
    uint64_t dropped = 0;
    uint64_t first_round = 0;
    uint64_t rounds = 0;  // 0: nothing was asked for
  };

  // `clock` outlives the recorder.
  explicit TraceRecorder(Clock* clock) : clock_(clock) {}
  TraceRecorder(const TraceRecorder&) = delete;
  TraceRecorder& operator=(const TraceRecorder&) = delete;

  // Notes the rounds [first_round, first_round + rounds) from now on; takes kMaxBytes at once. What was noted of other
  // rounds is dropped. Throws std::bad_alloc.
  void Record(uint64_t first_round, uint64_t rounds);
  bool Wants(uint64_t round) const {
    return round - first_.load(std::memory_order_relaxed) < rounds_.load(std::memory_order_relaxed);
  }
  // Notes what is not wanted any more are ignored; those for which there is no room are counted.
  void Note(const TraceSubject& subject, TimeNs begin_ns, TimeNs end_ns);
  // An instant.
  void Note(const TraceSubject& subject) {
    if (!Wants(subject.round)) return;
    const TimeNs now = Now();
    Note(subject, now, now);
  }
  // In the order in which they ended, `limit` at most.
  Page Read(uint64_t from, size_t limit) const;
  TimeNs Now() const { return clock_->Now(); }

 private:
  Clock* const clock_;
  std::atomic<uint64_t> first_{0};
  std::atomic<uint64_t> rounds_{0};
  mutable absl::Mutex mu_;
  std::vector<TraceNote> notes_ ABSL_GUARDED_BY(mu_);
  uint64_t dropped_ ABSL_GUARDED_BY(mu_) = 0;
};

// Notes that what its scope does was done. Not thread-safe.
class TraceSpan {
 public:
  // `recorder`, which may be null, outlives the span.
  TraceSpan(TraceRecorder* recorder, const TraceSubject& subject)
      : recorder_(recorder != nullptr && recorder->Wants(subject.round) ? recorder : nullptr), subject_(subject) {
    if (recorder_ != nullptr) begin_ns_ = recorder_->Now();
  }
  ~TraceSpan() {
    if (recorder_ != nullptr) recorder_->Note(subject_, begin_ns_, recorder_->Now());
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

  void SetBytes(uint64_t bytes) { subject_.bytes = bytes; }

 private:
  TraceRecorder* const recorder_;
  TraceSubject subject_;
  TimeNs begin_ns_ = 0;
};

}  // namespace gradwire

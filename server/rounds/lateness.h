// How long a round that has its quorum waits for the others, learned from how late they came in the rounds before.
// A pure state machine, like the rounds it serves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>

#include "common/base/clock.h"

namespace gradwire {

// The deadline counts from the moment at which a bucket has its quorum, and is
//
//   min(median + deviations * MAD of how late the last one came, median of how long the quorum took)
//
// over the last kWindow rounds. Frames that come after their round has closed count as well, so a member that is always
// late is not forgotten; of a round counts the latest frame, so one long pause is one outlier. The second term bounds
// what waiting costs: a round takes at most about twice as long as its quorum takes, however late the others are. It
// does not depend on the deadline, so nothing feeds back. With fewer than kFewest rounds to learn from there is no
// deadline: a round waits for everybody, at most until their leases end.
class Lateness {
 public:
  static constexpr size_t kWindow = 64;
  static constexpr size_t kFewest = 8;
  static constexpr TimeNs kShortestRest = 1'000'000'000;  // no pause of a scheduler lasts as long
  static constexpr TimeNs kRests = 4;

  explicit Lateness(double deviations) : deviations_(deviations) {}

  // A bucket of `round` has its quorum at `now`; the round opened at `opened`. Of a round counts the last bucket.
  void NoteQuorum(uint64_t round, TimeNs opened, TimeNs now);
  // A frame of `round` came `late_ns` after its bucket had its quorum.
  void NoteLate(uint64_t round, TimeNs late_ns);
  // The same for a frame whose round has closed; without effect where that has left the window.
  void NoteAfterClose(uint64_t round, TimeNs now);

  // From the quorum on; nothing: for as long as it takes.
  std::optional<TimeNs> Deadline() const { return deadline_; }
  // How long a round may do without its quorum while as many members wait for the next one: whoever takes longer rests.
  // kRests times as long as rounds take, kShortestRest at least; nothing: for as long as it takes.
  std::optional<TimeNs> Rest() const { return rest_; }

 private:
  struct Observed {
    uint64_t round = 0;
    TimeNs quorum_at = 0;
    TimeNs quorum_took = 0;
    std::optional<TimeNs> late;
  };
  Observed* Find(uint64_t round);
  void Update();

  const double deviations_;
  std::deque<Observed> window_;  // ascending rounds
  std::optional<TimeNs> deadline_;
  std::optional<TimeNs> rest_;
};

}  // namespace gradwire

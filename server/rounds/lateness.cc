// See lateness.h.
#include "server/rounds/lateness.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace gradwire {
namespace {

// The lower one of two middle values. `values` is not empty.
TimeNs Median(std::vector<TimeNs> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

Lateness::Observed* Lateness::Find(uint64_t round) {
  const auto it =
      std::find_if(window_.rbegin(), window_.rend(), [round](const Observed& o) { return o.round == round; });
  return it == window_.rend() ? nullptr : &*it;
}

void Lateness::NoteQuorum(uint64_t round, TimeNs opened, TimeNs now) {
  Observed* observed = Find(round);
  if (observed == nullptr) {
    if (window_.size() == kWindow) window_.pop_front();
    observed = &window_.emplace_back();
    observed->round = round;
  }
  observed->quorum_at = now;
  observed->quorum_took = now - opened;
}

void Lateness::NoteLate(uint64_t round, TimeNs late_ns) {
  Observed* observed = Find(round);
  if (observed == nullptr || (observed->late && *observed->late >= late_ns)) return;
  observed->late = late_ns;
  Update();
}

void Lateness::NoteAfterClose(uint64_t round, TimeNs now) {
  if (const Observed* observed = Find(round)) NoteLate(round, now - observed->quorum_at);
}

void Lateness::Update() {
  std::vector<TimeNs> late;
  std::vector<TimeNs> took;
  for (const Observed& observed : window_) {
    if (!observed.late) continue;
    late.push_back(*observed.late);
    took.push_back(observed.quorum_took);
  }
  if (late.size() < kFewest) return;
  const TimeNs median = Median(late);
  for (TimeNs& l : late) l = std::abs(l - median);
  const double deadline = static_cast<double>(median) + deviations_ * static_cast<double>(Median(late));
  const TimeNs quorum_takes = Median(took);
  deadline_ = static_cast<TimeNs>(std::min(deadline, static_cast<double>(quorum_takes)));
  rest_ = std::max(kShortestRest, kRests * (quorum_takes + *deadline_));
}

}  // namespace gradwire

// Who of a round came last, and how long after everybody else: whom a round waited for.
#pragma once

#include <algorithm>
#include <optional>

#include "common/base/clock.h"
#include "server/rounds/membership.h"

namespace gradwire {

class Arrivals {
 public:
  void Note(MemberId id, TimeNs now) {
    if (latest_ && latest_->id != id) others_at_ = latest_->at;
    latest_ = {id, now};
  }
  struct Last {
    MemberId id = 0;
    TimeNs behind = 0;  // the latest frame of any other member
  };
  // Nothing: frames of one member at most have come.
  std::optional<Last> last() const {
    if (!others_at_) return std::nullopt;
    return Last{latest_->id, latest_->at - *others_at_};
  }
  // How long frames of `id` alone have been awaited, where all others have come.
  TimeNs AwaitedFor(MemberId id, TimeNs now) const {
    if (!latest_) return 0;
    if (latest_->id != id) return now - latest_->at;
    return others_at_ ? now - *others_at_ : 0;
  }
  // Nobody could be heard for so long.
  void Excuse(TimeNs slept, TimeNs now) {
    if (latest_) latest_->at = std::min(latest_->at + slept, now);
    if (others_at_) *others_at_ = std::min(*others_at_ + slept, now);
  }

 private:
  struct Arrival {
    MemberId id = 0;
    TimeNs at = 0;
  };
  std::optional<Arrival> latest_;
  std::optional<TimeNs> others_at_;  // the latest frame of any but that member
};

}  // namespace gradwire

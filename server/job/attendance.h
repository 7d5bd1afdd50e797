// Who came to a job and who went: what members are told of each other, and since when nobody is there.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "common/base/clock.h"

namespace gradwire {

// Not thread-safe.
class Attendance {
 public:
  explicit Attendance(TimeNs now) : made_(now), used_(now) {}

  void NoteCame(TimeNs now) { used_ = now; }
  void NoteGone(std::string who_and_why, TimeNs now) {
    ++gone_;
    last_gone_ = std::move(who_and_why);
    used_ = now;
  }
  // The journal knows that all have left, since the job had made so many versions.
  void NoteAllLeft(uint64_t versions) { all_left_at_ = versions; }
  bool KnowsAllLeft(uint64_t versions) const { return all_left_at_ == versions; }

  TimeNs made() const { return made_; }
  TimeNs used() const { return used_; }    // when a worker came last, or the last one went
  uint64_t gone() const { return gone_; }  // members that went, so far
  const std::string& last_gone() const { return last_gone_; }

 private:
  TimeNs made_;
  TimeNs used_;
  uint64_t gone_ = 0;
  std::string last_gone_;
  uint64_t all_left_at_ = 0;
};

}  // namespace gradwire

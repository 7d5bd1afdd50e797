// Whether gradients that get ready wait for each other, to be taken in together. A bucket on its way wakes some ten
// threads of worker and shards. Where these take cores from backward, that costs more than waiting does, as long as
// what waited is soon sent. So gradients wait where the thread that makes them is kept from its core, and more of them
// from round to round as long as the shards have acknowledged all soon after the last one was ready. None wait on idle
// cores, nor for a slow network.
#pragma once

#include <cstdint>

#include "common/base/clock.h"

namespace gradwire::client {

// Not thread-safe.
class Coalescing {
 public:
  void RoundBegan(TimeNs now);
  // All gradients of the round are ready. They were made within `took`, for `delayed` of which the thread that says so
  // was kept from a core.
  void GradientsMade(TimeNs now, TimeNs took, TimeNs delayed);
  // A frame of the round was merged.
  void Acknowledged(TimeNs now) { acknowledged_ = now; }

  // So many bytes of gradients, as float32, may wait; 0: none do.
  uint64_t most_bytes() const { return most_bytes_; }

 private:
  // From which part of the time of making gradients on cores are scarce, and up to which part of a round it is soon.
  static constexpr int64_t kScarce = 25;
  static constexpr int64_t kSoon = 32;
  static constexpr uint64_t kStepBytes = 1u << 20;
  static constexpr uint64_t kMostBytes = 8u << 20;

  TimeNs began_ = 0;
  TimeNs made_ = 0;
  TimeNs acknowledged_ = 0;
  bool scarce_ = false;  // in the round that was made last
  uint64_t most_bytes_ = 0;
};

}  // namespace gradwire::client

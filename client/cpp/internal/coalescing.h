// Whether gradients that get ready wait for each other, to be taken in together. A bucket on its way wakes some ten
// threads of worker and shards. Where these take cores from backward, that costs more than waiting does, as long as
// what waited is soon sent. So gradients wait where the thread that reports them computes and was kept from its core,
// and more of them from round to round as long as the shards have acknowledged all soon after the last one was ready.
// None wait on idle cores, nor for a slow network, nor where several threads report them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <thread>

#include "common/base/clock.h"
#include "common/base/run_times.h"

namespace gradwire::client {

// Not thread-safe.
class Coalescing {
 public:
  // `run_times`: as RunTimesOfThisThread.
  explicit Coalescing(std::optional<RunTimes> (*run_times)() = &RunTimesOfThisThread) : run_times_(run_times) {}

  // `all_acknowledged`: the frames of the rounds before.
  void RoundBegan(TimeNs now, bool all_acknowledged);
  // On the thread that reports the first gradient of the round, and the last.
  void FirstReady(TimeNs now);
  void LastReady(TimeNs now);
  // A frame of the round came to its shard, whatever became of it there.
  void Acknowledged(TimeNs now) { acknowledged_ = now; }

  // So many bytes of gradients, as float32, may wait; 0: none do.
  uint64_t most_bytes() const { return most_bytes_; }
  // Whether what waits may go on waiting while so much of the round is not ready. What waits last is sent behind
  // backward, so there is less of it the nearer the end is.
  bool MayWait(uint64_t waiting_bytes, uint64_t missing_bytes) const {
    return waiting_bytes < std::min(most_bytes_, std::max(missing_bytes, kStepBytes));
  }

 private:
  // Cores are scarce from this part of the time between the first gradient and the last on in which the thread was kept
  // from one, if it wanted one for this part: else gradients are made elsewhere, and those threads disturb nobody.
  static constexpr int64_t kScarce = 25;
  static constexpr int64_t kBusy = 2;
  // Up to which part of a round it is soon.
  static constexpr int64_t kSoon = 32;
  static constexpr uint64_t kStepBytes = 1u << 20;
  static constexpr uint64_t kMostBytes = 8u << 20;

  std::optional<RunTimes> (*run_times_)();
  TimeNs began_ = 0;
  TimeNs first_ = 0;
  TimeNs last_ = 0;
  TimeNs acknowledged_ = 0;
  std::thread::id thread_;         // that reported the first
  std::optional<RunTimes> times_;  // of it, then
  bool scarce_ = false;
  uint64_t most_bytes_ = 0;
};

}  // namespace gradwire::client

// Simulated time and chance: a queue of events, a clock that jumps from one to the next, one random sequence per seed,
// and what a run leaves behind (trace, coverage, the first violation).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <utility>

#include "common/base/clock.h"
#include "tests/sim/coverage.h"

namespace gradwire::sim {

inline constexpr TimeNs kUs = 1000;
inline constexpr TimeNs kMs = 1000 * kUs;
inline constexpr TimeNs kSecond = 1000 * kMs;

// Not thread-safe. Outlives everything that is simulated.
class World final : public Clock {
 public:
  // `trace`: events are printed as they happen.
  World(uint64_t seed, bool trace) : random_(seed * 0x9E3779B97F4A7C15u + 1), trace_(trace) {}

  TimeNs Now() override { return now_; }
  // Events of one time run in the order in which they were asked for.
  void At(TimeNs when, std::function<void()> event) {
    events_.emplace(std::pair(std::max(when, now_), sequence_++), std::move(event));
  }
  void After(TimeNs delay, std::function<void()> event) { At(now_ + delay, std::move(event)); }
  // Runs the next event. False: there is none.
  bool Step();

  uint64_t Below(uint64_t n) { return random_() % n; }
  TimeNs Between(TimeNs low, TimeNs high) {
    return low + static_cast<TimeNs>(Below(static_cast<uint64_t>(high - low + 1)));
  }
  bool Chance(double probability) { return static_cast<double>(random_() >> 11) * 0x1p-53 < probability; }
  std::mt19937_64& random() { return random_; }

  bool tracing() const { return trace_; }
  // `line`: (std::ostream-free) a function that makes the text, called only where it is wanted.
  template <typename MakeLine>
  void Trace(MakeLine line) const {
    if (trace_) Print(line());
  }
  void Count(Event event) { ++coverage_[static_cast<size_t>(event)]; }
  const Coverage& coverage() const { return coverage_; }

  // An invariant does not hold. The first one is kept.
  void Violate(std::string what);
  const std::string& violation() const { return violation_; }
  bool violated() const { return !violation_.empty(); }

 private:
  void Print(const std::string& line) const;

  TimeNs now_ = 0;
  uint64_t sequence_ = 0;
  std::map<std::pair<TimeNs, uint64_t>, std::function<void()>> events_;
  std::mt19937_64 random_;
  const bool trace_;
  Coverage coverage_{};
  std::string violation_;
};

}  // namespace gradwire::sim

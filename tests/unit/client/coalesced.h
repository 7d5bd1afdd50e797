// A worker whose gradients wait for each other.
#pragma once

#include <optional>

#include "client/cpp/internal/coalescing.h"

namespace gradwire::client {

// What the kernel says in a test, of any thread. Each time that it is asked `step` more without a core, and `ran` on
// one.
struct ScriptedTimes {
  static std::optional<RunTimes> Read() {
    if (!says) return std::nullopt;
    said.delayed += step;
    said.ran += ran;
    return said;
  }
  static inline bool says = true;
  static inline RunTimes said;
  static inline TimeNs step = 0;
  static inline TimeNs ran = 0;
};

// Rounds of a second, in the first half of which gradients got ready, with so much of it without a core; frames were
// acknowledged so late behind it.
inline void MakeRounds(int rounds, TimeNs late, TimeNs delayed, Coalescing* coalescing, TimeNs* now) {
  constexpr TimeNs kMs = 1'000'000, kRound = 1000 * kMs, kMade = 500 * kMs;
  ScriptedTimes::step = delayed;
  ScriptedTimes::ran = kMade - delayed;
  for (int i = 0; i < rounds; ++i) {
    coalescing->RoundBegan(*now, /*all_acknowledged=*/true);
    coalescing->FirstReady(*now);
    coalescing->LastReady(*now + kMade);
    coalescing->Acknowledged(*now + kMade + late);
    *now += kRound;
  }
}

// 6 MiB may wait; in each round of which nothing is known three quarters of the one before.
inline Coalescing Coalesced() {
  constexpr TimeNs kMs = 1'000'000;
  Coalescing coalescing(&ScriptedTimes::Read);
  TimeNs now = kMs;
  MakeRounds(20, kMs, 100 * kMs, &coalescing, &now);
  coalescing.RoundBegan(now, true);
  return coalescing;
}

}  // namespace gradwire::client

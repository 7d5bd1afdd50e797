// A worker whose gradients wait for each other.
#pragma once

#include <optional>

#include "client/cpp/internal/coalescing.h"

namespace gradwire::client {

// What the kernel says in a test, of any thread. Each time that it is asked `step` more.
struct ScriptedDelay {
  static std::optional<TimeNs> Read() { return said ? std::optional(*said += step) : std::nullopt; }
  static inline std::optional<TimeNs> said = 0;
  static inline TimeNs step = 0;
};

// Rounds of a second, in the first half of which gradients got ready, with so much of it without a core; frames were
// acknowledged so late behind it.
inline void MakeRounds(int rounds, TimeNs late, TimeNs delayed, Coalescing* coalescing, TimeNs* now) {
  constexpr TimeNs kMs = 1'000'000, kRound = 1000 * kMs, kMade = 500 * kMs;
  ScriptedDelay::step = delayed;
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
  Coalescing coalescing(&ScriptedDelay::Read);
  TimeNs now = kMs;
  MakeRounds(20, kMs, 100 * kMs, &coalescing, &now);
  coalescing.RoundBegan(now, true);
  return coalescing;
}

}  // namespace gradwire::client

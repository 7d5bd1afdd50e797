// A worker whose gradients wait for each other.
#pragma once

#include "client/cpp/internal/coalescing.h"

namespace gradwire::client {

// Rounds of a second, the gradients of which were made in half of it, with too few cores.
inline void MakeRounds(int rounds, TimeNs late, TimeNs delayed, Coalescing* coalescing, TimeNs* now) {
  constexpr TimeNs kMs = 1'000'000, kRound = 1000 * kMs, kMade = 500 * kMs;
  for (int i = 0; i < rounds; ++i) {
    coalescing->RoundBegan(*now);
    coalescing->GradientsMade(*now + kMade, kMade, delayed);
    coalescing->Acknowledged(*now + kMade + late);
    *now += kRound;
  }
}

// 8 MiB may wait, 4 in the next round, where nothing is known of it.
inline Coalescing Coalesced() {
  constexpr TimeNs kMs = 1'000'000;
  Coalescing coalescing;
  TimeNs now = kMs;
  MakeRounds(20, kMs, 100 * kMs, &coalescing, &now);
  coalescing.RoundBegan(now);
  return coalescing;
}

}  // namespace gradwire::client

// What replaying a journal gathers beside the state of the buckets: what the round machine is restored from.
#pragma once

#include <cstdint>
#include <vector>

#include "common/journal/record.h"

namespace gradwire {

// Of the thread that replays.
struct ReplayState {
  struct Bucket {
    bool initial = false;                     // its initial parameters were found, or a later state
    uint64_t incarnation = 0;                 // of the worker that uploaded them; 0: a later state
    uint64_t base = 0;                        // version of that state: updates before it are in it
    uint64_t first_round = UINT64_MAX;        // of its first record
    uint64_t end_round = 0;                   // behind its last record
    uint64_t gap_end = 0;                     // records before this round are missing; 0: none are
    bool from_snapshot = false;               // and no later state followed
    std::vector<journal::Contribution> last;  // of its last record
  };
  std::vector<Bucket> buckets;
};

}  // namespace gradwire

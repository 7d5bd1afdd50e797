// See coverage.h.
#include "tests/sim/coverage.h"

#include <iterator>

namespace gradwire::sim {
namespace {

// In the order of Event.
constexpr const char* kNames[] = {
    "connection breaks",
    "half-open: the server is not told",
    "half-open: the worker is not told",
    "partition",
    "server killed",
    "server killed at a write",
    "power lost",
    "power lost at a write",
    "server replaced, the old one lives",
    "disk full",
    "syncs fail",
    "writes fail",
    "worker crashes",
    "worker paused",
    "worker slow",
    "worker leaves",
    "snapshot asked for",
    "standby killed",
    "standby cut off",
    "primary lost for good",
    "gradient not finite",
    "chunk of a frame lost",
    "chunk of a frame sent twice",
    "chunks of a frame swapped",
    "frame abandoned, begun anew",
    "connection breaks within a frame",
    "fault before everybody trains",
    "bit of a frame flipped",
    "frame sent twice",
    "request lost",
    "reply lost",
    "request repeated",
    "repeat recognized",
    "frame not included",
    "frame refused",
    "worker abstains",
    "resumed, same server",
    "resumed after a restart",
    "frames sent again",
    "round was over at a resume",
    "epoch fence: old server refuses",
    "data loss told to a worker",
    "joined again as a new incarnation",
    "lease expired",
    "torn tail cut",
    "recovered from a snapshot",
    "snapshot taken",
    "journal cut",
    "rounds wait for a full disk",
    "rounds go on without the disk",
    "journal healed",
    "start interrupted",
    "elements deferred",
    "frame partly there",
    "round closed over a member",
    "answer no longer kept",
    "caught up by updates",
    "caught up by parameters",
    "rounds skipped",
    "versions lost within the contract",
    "step of two rounds",
    "recovered between the rounds of a step",
    "round begun before the last ones were settled",
    "frame returned while later ones travel",
    "shards told norms",
    "peer could not be told",
    "skip of a round asked for",
    "round skipped by all shards",
    "skip asked for too late",
    "parameters gone, fate asked for",
    "asynchronous step",
    "merged into a later version than it was computed on",
    "standby in sync",
    "standby promoted",
    "promotion refused: not in sync",
};
static_assert(std::size(kNames) == kEvents);

}  // namespace

const char* NameOf(Event event) { return kNames[static_cast<size_t>(event)]; }

}  // namespace gradwire::sim

// How much memory a job may take on this server, computed before anything is allocated.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "common/codec/codec.h"
#include "common/job/job.h"
#include "common/job/layout.h"

namespace gradwire {

// Upper bounds in bytes. They do not depend on how many workers are there; histories and frames in flight grow with the
// spec's max_workers. Not counted: what workers that do not read their answers keep alive beyond them
// (server/README.md, "Memory").
struct MemoryBound {
  uint64_t parameters = 0;
  uint64_t moments = 0;
  uint64_t residuals = 0;     // of update codecs: before and after the round that is being compressed
  uint64_t accumulators = 0;  // of the rounds that may be open, and one being finished and decoded
  uint64_t updates = 0;       // retained update frames: see RetainedUpdates, and of sparse codecs OwedUpdates
  // Parameters and moments encoded for pullers, of each version that may be asked for; before there are any, what was
  // uploaded of them so far.
  uint64_t serialized = 0;
  uint64_t snapshot = 0;   // a copy of parameters, moments and residuals, of durable jobs
  uint64_t journal = 0;    // update frames that are not on disk yet, where rounds do not wait for that
  uint64_t layout = 0;     // the shard map
  uint64_t histories = 0;  // what workers contributed lately: PushHistory, of as many workers as the spec allows
  uint64_t in_flight = 0;  // partial frames: at least one of the largest bucket, times the workers of the spec
  uint64_t device = 0;     // memory of a device, where parameters, moments and sums lie there; not in the total

  uint64_t total() const {
    return parameters + moments + residuals + accumulators + updates + serialized + snapshot + journal + layout +
           histories + in_flight;
  }
  std::string ToString() const;
};

// Rounds of a bucket that are merged at once.
uint32_t OpenRounds(const Job& job);
// Update frames of a bucket that are kept for whoever asks: those that the slowest worker has not seen, and one more.
uint32_t RetainedUpdates(const Job& job);
// Older update frames, kept for workers that are in them and have not come back yet: of codecs that may defer elements,
// and of rounds that were skipped.
uint32_t OwedUpdates(const Job& job);
// How many pulls of one worker may wait for one bucket: an update and parameters of every open round, on the worker's
// stream and on a former one that is not known to be broken yet. One more takes the place of the oldest pull of another
// stream, and is refused where there is none.
uint32_t MaxWaitersPerMember(const Job& job);

// What a job holds at one moment, of what MemoryBound bounds and changes while it runs. In bytes where not said
// otherwise.
struct MemoryUse {
  uint64_t in_flight = 0;   // as counted against the bound
  uint64_t unfinished = 0;  // partial frames and uploads added up: equals in_flight, unless that count is wrong
  uint64_t accumulators = 0;
  uint64_t updates = 0;
  uint64_t serialized = 0;
  uint64_t partial_frames = 0;    // how many
  uint64_t retained_updates = 0;  // how many of one bucket, at most
  uint64_t owed_updates = 0;
  uint64_t waiters = 0;    // pulls of one member that wait in one bucket, at most
  uint64_t histories = 0;  // incarnations whose contributions are known
  uint64_t totals = 0;     // workers that are counted for the status
};

// `codecs` may be empty: then the part that needs none, what every job of this size takes. on_device: parameters,
// moments and sums lie there.
MemoryBound BoundMemory(const Job& job, const Layout& layout, uint32_t shard,
                        const std::vector<std::unique_ptr<Codec>>& codecs, uint64_t frame_limit_bytes, bool on_device);

// Answers that one worker has asked for and not read yet: a version and an update of every open round and of two more,
// on the worker's stream and on a former one that is not known to be broken yet. See UnsentBudget.
uint64_t MaxUnsentBytes(const Job& job, const Layout& layout, uint32_t shard,
                        const std::vector<std::unique_ptr<Codec>>& codecs);

// The shard map itself may take this much.
inline constexpr uint64_t kLayoutLimitBytes = 1ull << 30;
// What the shard map takes at most, known before it is made.
uint64_t LayoutBytes(const Job& job, uint32_t shard_count);

// What may be held of a bucket's initial parameters before they are whole: the parameters, and what chunks cost.
uint64_t MaxUploadBytes(uint64_t elements);

// What parameters and moments of one job may take where they lie, and which flag says so.
struct ArraysLimit {
  uint64_t bytes = 0;
  std::string_view flag;
};

// The check that is possible before the shard map is made. ResourceExhausted, with the numbers, when the least that
// parameters and moments of a shard take is over `arrays`, or the shard map would be over `limit_bytes` or over
// kLayoutLimitBytes.
absl::Status CheckMemoryBeforeLayout(const Job& job, uint32_t shard, uint32_t shard_count, const ArraysLimit& arrays,
                                     uint64_t limit_bytes);

}  // namespace gradwire

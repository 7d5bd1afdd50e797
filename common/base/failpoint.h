// Failpoints: named places at which a process can be made to die as by kill -9, so that tests can show what survives
// it. GRADWIRE_FAILPOINT=NAME or NAME:N in the environment of gradwire-server (or of a test's worker) arms one: the
// process kills itself the N-th time it comes there. Where none is armed, a place costs one relaxed load.
#pragma once

#include <atomic>
#include <cstdint>
#include <iterator>
#include <string_view>
#include <type_traits>

#include "absl/status/status.h"

namespace gradwire::failpoint {

// Every name, in the order in which the process comes to it. tests/chaos has a run for each.
inline constexpr std::string_view kNames[] = {
    // The shard server: its start and a job's
    "epoch.before_write",
    "file.before_rename",  // any small file: the epoch, a job, a manifest
    "epoch.after_write",
    "job.before_rename",
    "job.after_rename",
    "initialize.before_journal",  // a bucket's initial parameters are here
    "initialize.between_buckets",
    // A round
    "push.chunk_merged",
    "round.before_close",  // the last frame of a bucket is merged
    "norms.before_exchange",
    "norms.after_exchange",
    "norms.before_write",    // of a bucket: its norms are in the update frame
    "round.before_journal",  // the update frame is made
    "journal.segment.before_header",
    "journal.segment.after_header",
    "journal.segment.full",
    "journal.record.before_write",
    "journal.record.torn",  // half of a record is written
    "journal.record.after_write",
    "journal.sync.before",
    "journal.sync.after",
    "version.before_visible",
    "version.after_visible",  // nobody was told yet
    "answer.before_chunk",
    "push.before_ack",
    // A snapshot
    "snapshot.between_files",
    "snapshot.before_rename",
    "snapshot.after_rename",
    "snapshot.removing_old",
    "journal.cut.before",
    "journal.cut.between",
    "journal.cut.after",
    // Recovery
    "recovery.after_snapshot",
    "recovery.after_record",
    "recovery.before_serving",
    // The worker
    "worker.frame.encoded",
    "worker.frame.half_sent",
    "worker.frame.sent",
    "worker.frame.acked",
    "worker.update.applied",  // of one bucket
    "checkpoint.before_rename",
    "checkpoint.after_rename",
};
inline constexpr uint32_t kNone = UINT32_MAX;

// Does not compile for a name that is not in the list.
consteval uint32_t IndexOf(std::string_view name) {
  for (uint32_t i = 0; i < std::size(kNames); ++i) {
    if (kNames[i] == name) return i;
  }
  throw "this failpoint is not in the list above";
}

// Of the process, like its death.
inline constinit std::atomic<uint32_t> armed{kNone};

// The environment variable that says where a process is to die.
inline constexpr char kVariable[] = "GRADWIRE_FAILPOINT";

// `spec`: NAME or NAME:N, N from 1; empty: nothing is armed. InvalidArgument lists the names. Before other threads come
// to failpoints.
absl::Status Arm(std::string_view spec);

// The process came to the armed place: true at the hit that is to be its last.
bool Hit();
[[noreturn]] void Die();

}  // namespace gradwire::failpoint

// True where the process is to die here, after it has done half of something.
#define GW_FAILPOINT_DUE(name)                                                          \
  (::gradwire::failpoint::armed.load(std::memory_order_relaxed) ==                      \
       std::integral_constant<uint32_t, ::gradwire::failpoint::IndexOf(name)>::value && \
   ::gradwire::failpoint::Hit())

#define GW_FAILPOINT(name)                                    \
  do {                                                        \
    if (GW_FAILPOINT_DUE(name)) ::gradwire::failpoint::Die(); \
  } while (false)

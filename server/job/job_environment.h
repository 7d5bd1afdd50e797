// What a job gets from the server around it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>

#include "absl/synchronization/mutex.h"
#include "common/base/clock.h"
#include "kernels/backend.h"
#include "kernels/cuda/device_share.h"
#include "server/job/memory_account.h"
#include "server/job/served_epochs.h"
#include "server/job/update_sink.h"
#include "server/norms/tellers.h"

namespace gradwire {

namespace journal {
class Journal;
}

// Everything pointed to outlives the job.
struct JobEnvironment {
  kernels::Backend* backend = nullptr;           // over host memory
  kernels::cuda::DeviceShare* device = nullptr;  // null: jobs are in host memory
  Clock* clock = nullptr;
  uint64_t frame_limit_bytes = 0;  // one frame, all chunks
  uint64_t job_memory_limit_bytes = 0;
  // A promotion begins them anew; with a lease the loss of a standby raises them, and the first update of a job.
  std::shared_ptr<ServedEpochs> epochs = std::make_shared<ServedEpochs>();
  // The id of this server's lineage; a standby takes its primary's.
  std::shared_ptr<std::atomic<uint64_t>> server_lineage = std::make_shared<std::atomic<uint64_t>>(0);
  std::function<void()> tick_sooner;  // a deadline came nearer; may be empty; called without a lock held
  // How long this process did not run before this time, as far as is known; may be empty. Called with locks held.
  std::function<TimeNs(TimeNs now)> slept;
  // Null: norms get no threads; a simulator takes their turns (Agreement::Pump).
  std::shared_ptr<Tellers> tellers = std::make_shared<Tellers>();
  std::shared_ptr<absl::Mutex> digest_turn = std::make_shared<absl::Mutex>();                // see ParameterDigest
  std::shared_ptr<std::atomic<int>> digest_waiters = std::make_shared<std::atomic<int>>(0);  // so is this
  std::shared_ptr<MemoryAccount> account;  // of all jobs; null: each job has its own limit alone
  // Empty: journals and snapshots get threads of their own. A simulator, which takes their turns itself, is given every
  // journal before it starts, and returns what the job is to write to.
  std::function<std::unique_ptr<UpdateSink>(std::unique_ptr<journal::Journal>)> adopt_journal;
  // What sums are computed on.
  std::string_view backend_name() const { return device != nullptr ? device->backend().name() : backend->name(); }
  // False only where the simulator proves that it notices what is merged twice (JointRounds::Rules).
  bool recognize_repeats = true;
};

}  // namespace gradwire

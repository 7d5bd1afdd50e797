// The daemon without its process: jobs, services, the lease ticker and listeners. main() adds flags and signals; tests
// run it in their own process over any transport.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/base/clock.h"
#include "common/base/work_pool.h"
#include "common/storage/data_directory.h"
#include "common/storage/posix_disk.h"
#include "common/transport/transport.h"
#include "kernels/backend.h"
#include "kernels/cuda/device_share.h"
#include "server/config/config.h"
#include "server/job/job_registry.h"
#include "server/metrics/exporter.h"
#include "server/replication/replication.h"
#include "server/services/dispatcher.h"

namespace gradwire {

// Thread-safe after Start. Destroying it closes everything at once; call Drain before to end gracefully.
class Daemon {
 public:
  // `clock` outlives the daemon. Errors: those of the backend, of DeviceShare::Make, DataDirectory::Open and Listen.
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(const ServerConfig& config, Clock* clock);
  // The same with a backend that is not made from config.backend.
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(const ServerConfig& config, Clock* clock,
                                                       std::unique_ptr<kernels::Backend> backend);
  ~Daemon();
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  // What clients dial, one per configured address.
  std::vector<std::string> addresses() const;
  std::string metrics_url() const { return exporter_ != nullptr ? exporter_->url() : ""; }  // empty: there are none
  JobRegistry& registry() { return *registry_; }
  Replication& replication() { return *replication_; }

  // Health says NOT_SERVING, nobody may join, and open rounds get `drain_ms` to finish; then all streams end with
  // Unavailable. What rounds went on without is written first, if the disk is well again within that time. Blocks.
  // DataLoss: it was not; one of the jobs that lose rounds, all are logged.
  absl::Status Drain(uint32_t drain_ms);

 private:
  Daemon() = default;
  void TickUntilStopped();
  void TickReplicationUntilStopped();
  void ReturnFreedMemory();
  absl::Duration UntilNextTick();

  Clock* clock_ = nullptr;
  PosixDisk disk_;
  std::unique_ptr<DataDirectory> data_;                 // null without --data-dir
  std::unique_ptr<kernels::Backend> backend_;           // over host memory
  std::unique_ptr<kernels::Backend> gpu_backend_;       // null: jobs are in host memory
  std::unique_ptr<kernels::cuda::DeviceShare> device_;  // null: jobs are in host memory
  std::unique_ptr<JobRegistry> registry_;
  std::unique_ptr<Replication> replication_;
  std::unique_ptr<WorkerService> worker_service_;
  std::unique_ptr<OperatorService> operator_service_;
  std::unique_ptr<ReplicationService> replication_service_;
  std::unique_ptr<PeerService> peer_service_;
  std::unique_ptr<Dispatcher> dispatcher_;
  std::vector<std::unique_ptr<transport::Listener>> listeners_;
  std::vector<std::unique_ptr<transport::Listener>> within_;  // the same, for this process alone
  std::unique_ptr<metrics::Exporter> exporter_;  // null without --metrics-listen; the first to go, it reads the others
  std::unique_ptr<WorkPool> closers_;            // buckets that the ticker found due
  std::thread ticker_;                           // of the jobs: ends leases of workers, finds what is due
  std::thread replication_ticker_;               // of this server's own lease and its standbys, which wait for no job

  // Of the ticker.
  TimeNs next_look_ = 0;
  uint64_t returned_ = 0;    // what jobs had given back when memory was returned last
  uint64_t free_bytes_ = 0;  // of the heap, at the last look

  // When the ticker looks again at the latest; who comes later before it finds that this process did not run.
  std::atomic<TimeNs> tick_due_{std::numeric_limits<TimeNs>::max()};

  absl::Mutex mu_;
  absl::CondVar wake_;
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
  bool tick_sooner_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace gradwire

// One simulated run: a job, its servers and workers, a schedule of faults, and the wait for progress once they stop.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/sim/oracle.h"
#include "tests/sim/server_node.h"
#include "tests/sim/setup.h"
#include "tests/sim/worker_node.h"
#include "tests/sim/world.h"

namespace gradwire::sim {

// Not thread-safe. The same seed gives the same run, traced or not.
class Run {
 public:
  Run(uint64_t seed, Broken broken, bool trace);
  // Until the workers have made progress after the last fault, or an invariant does not hold.
  void Go();

  World& world() { return world_; }
  const Setup& setup() const { return *setup_; }
  ServerNode& AnyServer() { return *servers_[world_.Below(servers_.size())]; }
  WorkerNode& AnyWorker() { return *workers_[world_.Below(workers_.size())]; }
  uint32_t AnyShard() { return static_cast<uint32_t>(world_.Below(servers_.size())); }
  std::vector<std::unique_ptr<ServerNode>>& servers() { return servers_; }
  // That of any shard; null where the job has none.
  ServerNode* AnyStandby() { return standbys_.empty() ? nullptr : standbys_[world_.Below(standbys_.size())].get(); }
  // The primary of a standby in sync is lost for good, and the standby is promoted, as soon as it may be; where it may
  // not, the primary comes back. False: there is none in sync.
  bool LosePrimary();
  std::vector<std::unique_ptr<WorkerNode>>& workers() { return workers_; }
  // May versions be lost, now, without the job being lost? Not where another shard would be ahead for good.
  bool MayLosePower() const { return setup_->shards == 1 || !setup_->may_lose_versions(); }

 private:
  bool AllTrain(uint64_t version) const;
  uint64_t NewestVersion() const;
  void Replace(ServerNode* primary, ServerNode* standby);
  void PlanFaults();
  void StopFaults();
  bool Step();

  const Broken broken_;
  World world_;
  std::unique_ptr<Setup> setup_;
  std::unique_ptr<Oracle> oracle_;
  std::vector<std::unique_ptr<ServerNode>> servers_;   // by shard: that serve
  std::vector<std::unique_ptr<ServerNode>> standbys_;  // by shard, or empty; where one was promoted, the lost machine
  std::vector<std::unique_ptr<WorkerNode>> workers_;
  TimeNs faults_end_ = 0;
};

}  // namespace gradwire::sim

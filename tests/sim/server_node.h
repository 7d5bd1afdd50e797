// One server machine: its disk, and the process that runs on it: the real services, registry, shard and journal, whose
// turns the simulator takes. A process that was replaced may live on for a while, cut off from the disk.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "common/storage/data_directory.h"
#include "server/job/job_registry.h"
#include "server/journal/journal.h"
#include "server/replication/replication.h"
#include "server/services/dispatcher.h"
#include "tests/lib/fake_disk.h"
#include "tests/sim/network.h"
#include "tests/sim/oracle.h"
#include "tests/sim/server_disk.h"
#include "tests/sim/setup.h"
#include "tests/sim/world.h"

namespace gradwire::sim {

// What is broken on purpose, to see that the invariants notice.
// kPromotion: a standby is promoted without which rounds went on.
enum class Broken { kNothing, kDedup, kEarlyAck, kFate, kPromotion };

class ServerNode;

// From the start of a process to its end. Not thread-safe.
class ServerProcess {
 public:
  ServerProcess(World* world, const Setup* setup, Oracle* oracle, ServerNode* node, uint32_t shard, uint64_t id,
                Broken broken, std::vector<std::unique_ptr<ServerNode>>* servers);
  ~ServerProcess();

  // Recovers the job. An error: the process ends at once.
  absl::Status Start();
  Target target() { return {&*dispatcher_, id_}; }
  uint64_t id() const { return id_; }
  uint64_t epoch() const { return data_ == nullptr ? 0 : data_->epoch(); }
  ServerDisk& disk() { return disk_; }
  bool alive() const { return !disk_.dead(); }
  // Cut off from disk, streams and oracle, but it still answers calls.
  void Replaced();
  std::shared_ptr<JobShard> job();
  void Adopt(const std::shared_ptr<SimStream>& stream) { streams_.push_back(stream); }
  // All streams: their clients hear of it after about `delay`, or never.
  void DropStreams(bool silently);
  void TakeSnapshot();
  // What must hold between any two events.
  void Check();
  // What the shard itself applied is what everybody else gets: its parameters, where all its buckets have one version.
  void CheckParameters(JobShard& shard);
  journal::Journal* journal() { return journal_; }
  Replication& replication() { return *replication_; }
  bool serving() const { return replication_->CheckServing().ok(); }
  // The standby of this server is in sync, as it says itself.
  bool HasStandbyInSync();

 private:
  class Tap;
  std::unique_ptr<UpdateSink> AdoptJournal(std::unique_ptr<journal::Journal> journal);
  void SchedulePump(TimeNs when);
  void Pump();
  void ScheduleTick(TimeNs when);
  void Tick();
  // Where the shards agree on norms: goes on with what is held, tells the others.
  void TakeNormTurns(JobShard& shard);
  void TellPeer(NormExchange& exchange, size_t to);
  // Feeds its standby, follows its primary.
  void TakeReplicationTurns();

  World* const world_;
  const Setup* const setup_;
  Oracle* oracle_;
  ServerNode* const node_;
  const uint32_t shard_;
  const uint64_t id_;
  const Broken broken_;
  std::vector<std::unique_ptr<ServerNode>>* const servers_;
  ServerDisk disk_;
  std::unique_ptr<DataDirectory> data_;
  std::unique_ptr<JobRegistry> registry_;
  std::unique_ptr<Replication> replication_;
  std::unique_ptr<WorkerService> worker_;
  std::unique_ptr<OperatorService> operator_;
  std::unique_ptr<ReplicationService> standbys_;
  std::unique_ptr<PeerService> peers_;
  std::unique_ptr<Dispatcher> dispatcher_;
  journal::Journal* journal_ = nullptr;  // of the job
  uint64_t checked_ = UINT64_MAX;        // version whose parameters were looked at
  TimeNs pump_at_ = -1;
  TimeNs tick_at_ = -1;
  TimeNs tell_at_ = -1;
  TimeNs replicate_at_ = -1;
  bool norms_scheduled_ = false;
  uint64_t short_rounds_ = 0;
  bool was_degraded_ = false;
  std::vector<std::weak_ptr<SimStream>> streams_;
  std::shared_ptr<bool> here_ = std::make_shared<bool>(true);  // for events that outlive this
};

class ServerNode {
 public:
  // `servers`: all that serve, by shard. `primary`: the one that this follows, or null.
  ServerNode(World* world, const Setup* setup, Oracle* oracle, uint32_t shard, Broken broken,
             std::vector<std::unique_ptr<ServerNode>>* servers, ServerNode* primary);

  testing_support::FakeDisk& disk() { return disk_; }
  // Null while it is down.
  ServerProcess* process() { return process_ == nullptr || !process_->alive() ? nullptr : process_.get(); }
  // An older process that still answers, if there is one.
  Path& path(uint32_t shard) { return paths_[shard]; }
  ServerProcess* replaced() { return replaced_.get(); }
  void EndReplaced() { replaced_ = nullptr; }

  void Start();
  // An operator has it take over. Fails where it is not in sync, unless that is broken on purpose.
  absl::Status Promote();
  // The machine is lost, and never comes back.
  void Lose();
  // It was not lost after all.
  void ComeBack();
  uint32_t shard() const { return shard_; }
  ServerNode* primary() const { return primary_; }
  Path& primary_path() { return primary_path_; }
  // The connection to its primary breaks.
  void CutOff(TimeNs own_delay, TimeNs primary_delay);
  std::weak_ptr<SimStream>* follow_stream() { return &follow_stream_; }
  // The process is killed; with `power`, the machine loses it, too. It starts again after `away`; `leave_old`: the old
  // process lives on until the next one has been replaced, too.
  void Kill(bool power, TimeNs away, bool leave_old = false);
  // After every event: a process that died in it is cleared away, another one checked.
  void Settle();
  // What faults did to the disk ends.
  void HealDisk();
  void NoteDiskFault() { disk_was_well_ = false; }
  // What a fault does to the disk may take versions along that were seen.
  void MayLoseVersions() { may_lose_versions_ = true; }

 private:
  // What it serves from now on is all that there is of the shard.
  void TellRecovered();

  World* const world_;
  const Setup* const setup_;
  Oracle* const oracle_;
  const uint32_t shard_;
  const Broken broken_;
  std::vector<std::unique_ptr<ServerNode>>* const servers_;
  ServerNode* const primary_;
  std::vector<Path> paths_;  // to the other shards
  Path primary_path_;
  std::weak_ptr<SimStream> follow_stream_;
  bool lost_ = false;  // for good
  testing_support::FakeDisk disk_;
  std::unique_ptr<ServerProcess> process_;
  std::unique_ptr<ServerProcess> replaced_;
  uint64_t starts_ = 0;
  std::optional<TimeNs> power_lost_at_;
  std::optional<TimeNs> stopped_at_;  // since then no server was up, and nothing was synced
  bool disk_was_well_ = true;
  bool may_lose_versions_ = false;
};

}  // namespace gradwire::sim

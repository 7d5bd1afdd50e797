// One worker: a training loop whose process may crash and come back. What a process knows of its rounds, encodes and
// applies is the client library's (RoundLedger, SliceWork, GradientStore, Replica); how it joins, starts, notices
// breaks and mends them is written here as ShardLink, Starter and Exchange do it, without their threads.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client/cpp/internal/async_exchange.h"
#include "client/cpp/internal/frame_link.h"
#include "client/cpp/internal/gradients.h"
#include "client/cpp/internal/replica.h"
#include "client/cpp/internal/round_ledger.h"
#include "client/cpp/internal/slice_work.h"
#include "gradwire/v1/worker.pb.h"
#include "tests/sim/network.h"
#include "tests/sim/oracle.h"
#include "tests/sim/server_node.h"
#include "tests/sim/setup.h"
#include "tests/sim/world.h"

namespace gradwire::sim {

class WorkerNode;

// One incarnation, from its start to its end. Owned by its node; events of one that has ended do nothing.
class WorkerSession : public std::enable_shared_from_this<WorkerSession> {
 public:
  WorkerSession(WorkerNode* node, uint64_t incarnation);
  void Start();
  void End(bool leave);
  // A break of the connection to one shard. Each end hears of it or not.
  void Break(uint32_t shard, TimeNs client_delay, TimeNs server_delay);
  // What must hold between any two events.
  void Check() const;
  bool training() const { return work_ != nullptr || async_ != nullptr; }
  uint64_t version() const { return async_ ? async_->version() : ledger_ ? ledger_->round() : 0; }

 private:
  using Entry = client::RoundLedger::Entry;
  struct Link;
  friend class LinkEnd;
  // What is pulled to catch up: of every slice the versions from `first` to `last`.
  struct Catching {
    v1::PullKind kind = v1::PULL_UNSPECIFIED;
    uint64_t first = 0;
    uint64_t last = 0;
    std::vector<std::vector<wire::Chunk>> chunks;  // [(version - first) * slices + slice]
    size_t missing = 0;
    uint64_t resumed = 0;
  };
  // Of one frame: its bytes, the residual before it was encoded and behind it.
  struct Sending {
    client::SliceBytes bytes;
    std::vector<float> before;
    std::vector<float> after;
  };

  // Joining and starting, as Starter.
  void JoinNext(uint32_t shard, int pass, TimeNs backoff);
  void Joined(uint32_t shard, int pass, const v1::JoinReply& reply);
  void StartStep();
  void Upload(uint32_t shard);
  void RequestPull(uint32_t shard, v1::PullKind kind, uint64_t version);
  void RequestPull(uint32_t shard, v1::PullKind kind, uint64_t version, uint32_t bucket, uint32_t count);
  void FinishStart();
  // Of pulled parameters: with asynchronous rounds a later one than was asked for.
  uint64_t VersionOf(const std::vector<wire::Chunk>& answer) const;

  // As ShardLink.
  v1::JoinRequest RequestTo(uint32_t shard) const;
  void OpenStreams(uint32_t shard);
  void Heartbeat(uint32_t shard);
  void OnBroken(uint32_t shard, uint64_t connection, const absl::Status& status);
  void Mend(uint32_t shard, TimeNs deadline, TimeNs backoff);
  // The shard took the worker (back), which knew of epoch `known` when it asked. False: by now it knows of a later one.
  bool Joined(uint32_t shard, uint64_t known, const v1::JoinReply& reply);
  void Mended(uint32_t shard, uint64_t round, uint64_t known, bool old, const v1::JoinReply& reply);
  void SetResumePoint(uint32_t shard, v1::JoinRequest* request) const;
  // A shard does not take this worker back. `old`: its server was replaced.
  void JoinRefused(const absl::Status& status, bool old);
  void Fail(const absl::Status& status);
  // `round`: of the frame; nothing: of none, it brings initial parameters.
  // `whole`: with all its chunks, in order.
  bool SendTo(uint32_t shard, const std::vector<Bytes>& chunks, const std::vector<v1::PullKind>& pull,
              std::optional<uint64_t> round, bool whole = false);
  bool SendBadly(uint32_t shard, size_t chunks, const std::function<void(size_t)>& send);

  // As Exchange.
  // `again`: round 0 is over, the same gradients travel as round 1.
  void BeginRound(bool again);
  void SaveUntaken();
  // A round that was skipped leaves nothing behind, in what this worker keeps of any tensor.
  void CheckUntaken() const;
  void SendSlice(uint32_t slice);
  void SendFrame(Entry entry, bool abstain);
  void SendAgain(Entry entry);
  void OnAck(uint32_t shard, const v1::PushAck& ack);
  void OnAnswer(uint32_t shard, v1::PullKind kind, uint32_t bucket, uint64_t version, const absl::Status& status,
                std::vector<wire::Chunk> chunks);
  void Run(const client::RoundLedger::Actions& actions);
  // What may be applied is, and the caller's step ends where it may.
  void GoOn();
  bool SettleNext();
  void Settle(Entry entry);
  bool MayGoOn() const;
  bool Carries(uint64_t round) const;
  void CheckShard(uint32_t shard);
  // The caller's next step.
  void FinishStep();

  // Asynchronous rounds: AsyncExchange itself, whose calls are made here.
  class AsyncLink;
  void StartAsync(std::vector<PlanWindow> plans, const std::vector<uint64_t>& versions);
  void BeginAsyncStep();
  // Ends the step where it may end.
  void PollAsync();
  absl::Status PushAsync(uint32_t shard, const std::vector<Bytes>& chunks, const std::vector<v1::PullKind>& pull);
  void OnAsyncAnswer(uint32_t shard, client::PullAnswer answer);
  // What it has of each slice is a version that was made, and no gradient was lost or came twice.
  void CheckAsync();

  // As Exchange, when the shards are rounds ahead.
  void CatchUp();
  void AgreeToCatchUp();
  void AgreeNext(uint32_t shard, int pass, uint64_t version);
  void CatchUpTo(uint64_t version);
  void OnCaught(uint32_t shard, v1::PullKind kind, uint32_t bucket, uint64_t version, const absl::Status& status,
                std::vector<wire::Chunk> chunks);
  void TakeCaught();
  // `held`: what the residual was before it was settled.
  void CheckResidual(Entry entry, bool included, const std::vector<float>& held);
  // What this session knows of the shard is of a server whose versions were lost since. It will be told.
  bool Outlived(uint32_t shard) const;

  // Runs `call` later, unless the session has ended or its process is paused, which puts it off.
  void Later(TimeNs delay, std::function<void()> call);
  void Guarded(std::function<void()> call);
  uint64_t member() const;
  std::vector<float> ResidualOf(uint32_t slice);
  // Pending and second moments (zeros where there are none), steps.
  std::vector<float> KeptOf(uint32_t tensor) const;
  Sending& Of(Entry entry) {
    return sending_[entry.round % (setup_->staleness() + 1) * setup_->slices() + entry.slice];
  }

  WorkerNode* const node_;
  World* const world_;
  const Setup* const setup_;
  const uint64_t incarnation_;
  bool over_ = false;
  std::vector<std::unique_ptr<Link>> links_;
  // Starting.
  uint64_t version_ = 0;
  bool may_initialize_ = false;
  bool started_ = false;
  // Training.
  std::vector<std::vector<float>> memory_;
  std::vector<std::vector<float>> gradient_;
  std::unique_ptr<client::Replica> replica_;
  std::unique_ptr<client::GradientStore> gradients_;
  std::unique_ptr<client::SliceWork> work_;
  std::unique_ptr<client::RoundLedger> ledger_;
  std::vector<bool> bad_;         // by tensor: its gradient was refused
  std::vector<Sending> sending_;  // of the open rounds, see Of
  std::deque<Entry> decoded_;     // to be applied in turn
  // Before the step's gradients were taken in, in jobs that may skip it: residuals by slice, all it keeps by tensor.
  std::vector<std::vector<float>> untaken_;
  std::vector<std::vector<float>> kept_;
  bool skipped_ = false;  // the round that was settled last
  bool in_step_ = false;  // of the caller: between, nothing is applied
  std::vector<std::unique_ptr<AsyncLink>> async_links_;
  std::unique_ptr<client::AsyncExchange> async_;
  std::vector<std::vector<double>> fed_;  // by tensor: the sum of all gradients that it was given, asynchronous
  // Catching up.
  std::optional<Catching> catching_;
  std::vector<std::optional<uint64_t>> agreed_;  // by shard: the version that it named
  bool by_updates_ = false;
  uint64_t catch_up_ = 0;  // attempts so far
  uint64_t resumed_ = 0;   // times that a shard has got new streams
};

class WorkerNode {
 public:
  WorkerNode(World* world, const Setup* setup, Oracle* oracle, std::vector<std::unique_ptr<ServerNode>>* servers,
             uint32_t index);

  void Start();
  void Crash(TimeNs away);
  void Leave(TimeNs away);
  void Pause(TimeNs how_long);
  void SlowDown(TimeNs how_long) { next_think_ = how_long; }
  // A session that cannot go on: a new process is started, as an operator would.
  void SessionFailed();

  WorkerSession* session() { return session_.get(); }
  Path& path(uint32_t shard) { return paths_[shard]; }
  std::string name() const { return name_; }

  // Used by the session.
  World* world() const { return world_; }
  const Setup* setup() const { return setup_; }
  Oracle* oracle() const { return oracle_; }
  ServerNode& server(uint32_t shard) { return *(*servers_)[shard]; }
  TimeNs paused_until() const { return paused_until_; }
  TimeNs TakeThink();
  double flip = 0;          // of a sent frame
  double repeat = 0;        // of a sent frame
  bool repeated = false;    // that has happened
  double chunk_fault = 0;   // of a sent frame: something happens between its chunks
  double bad_gradient = 0;  // of a tensor

 private:
  World* const world_;
  const Setup* const setup_;
  Oracle* const oracle_;
  std::vector<std::unique_ptr<ServerNode>>* const servers_;
  const std::string name_;
  std::vector<Path> paths_;
  std::shared_ptr<WorkerSession> session_;
  uint64_t incarnations_ = 0;
  TimeNs paused_until_ = 0;
  std::optional<TimeNs> next_think_;
};

}  // namespace gradwire::sim

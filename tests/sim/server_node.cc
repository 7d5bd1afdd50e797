// See server_node.h.
#include "tests/sim/server_node.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "common/base/status_macros.h"
#include "common/snapshot/snapshot_files.h"
#include "gradwire/v1/peer.pb.h"
#include "server/norms/norm_exchange.h"
#include "server/snapshot/snapshotter.h"
#include "tests/sim/memory_check.h"
#include "tests/sim/peer_channel.h"

namespace gradwire::sim {
namespace {

constexpr TimeNs kTick = 200 * kMs;
constexpr TimeNs kPeerTimeout = 2 * kSecond;  // as NormExchange
constexpr TimeNs kFollowerTimeout = kSecond;
constexpr uint64_t kFrameLimitBytes = 8u << 10;  // a few times the largest frame of these jobs

// Of a request or reply between shards.
template <typename Message>
std::string WithoutFate(const std::string& serialized) {
  Message message;
  message.ParseFromString(serialized);
  if (message.has_sums()) message.mutable_sums()->clear_fate();
  return message.SerializeAsString();
}

absl::Time AsTime(TimeNs now) { return absl::FromUnixNanos(now); }

}  // namespace

// Between the job and its journal: tells the oracle, and has the journal's turn taken soon.
class ServerProcess::Tap final : public UpdateSink {
 public:
  Tap(ServerProcess* process, std::unique_ptr<journal::Journal> journal)
      : process_(process), journal_(std::move(journal)) {}

  void Append(journal::Record record, std::function<void()> visible) override {
    if (process_->oracle_ != nullptr) {
      process_->serving() ? process_->oracle_->Appended(process_->shard_, record)
                          : process_->oracle_->Followed(process_->shard_, record);
    }
    World& world = *process_->world_;
    if (process_->broken_ == Broken::kEarlyAck) {
      journal_->Append(std::move(record), [] {});
      visible();
    } else {
      journal_->Append(std::move(record), std::move(visible));
    }
    process_->SchedulePump(world.Now() + world.Between(10 * kUs, 3 * kMs));
  }
  void Stop() override { journal_->Stop(); }
  journal::JournalStatus status() const override { return journal_->status(); }
  void SnapshotTaken(uint64_t version, uint64_t keep_from) override {
    journal_->SnapshotTaken(version, keep_from);
    process_->SchedulePump(process_->world_->Now() + kMs);
  }

 private:
  ServerProcess* const process_;
  const std::unique_ptr<journal::Journal> journal_;
};

ServerProcess::ServerProcess(World* world, const Setup* setup, Oracle* oracle, ServerNode* node, uint32_t shard,
                             uint64_t id, Broken broken, std::vector<std::unique_ptr<ServerNode>>* servers)
    : world_(world),
      setup_(setup),
      oracle_(oracle),
      node_(node),
      shard_(shard),
      id_(id),
      broken_(broken),
      servers_(servers),
      disk_(&node->disk()) {}

ServerProcess::~ServerProcess() {
  *here_ = false;
  for (const auto& weak : streams_)
    if (const auto stream = weak.lock()) stream->ServerGone(kKeepalive);
}

absl::Status ServerProcess::Start() {
  auto data = DataDirectory::Open(&disk_, "/machine/data");
  if (!data.ok()) return data.status();
  data_ = *std::move(data);
  JobEnvironment environment;
  environment.backend = setup_->backend.get();
  environment.clock = world_;
  environment.frame_limit_bytes = kFrameLimitBytes;
  environment.job_memory_limit_bytes = 1u << 30;
  environment.epochs->Begin(data_->epoch());
  environment.adopt_journal = [this](std::unique_ptr<journal::Journal> journal) {
    return AdoptJournal(std::move(journal));
  };
  environment.tellers = nullptr;
  environment.tick_sooner = [this] { ScheduleTick(world_->Now() + kMs); };
  environment.recognize_repeats = broken_ != Broken::kDedup;
  JobRegistry::Limits limits;
  limits.memory_bytes = 1u << 30;
  limits.max_jobs = 1;
  limits.snapshot_journal_bytes = setup_->segment_bytes;
  registry_ = std::make_unique<JobRegistry>(environment, limits, data_.get());
  ReplicationOptions replication;
  replication.threads = false;
  replication.follower_timeout_ms = kFollowerTimeout / kMs;
  if (node_->primary() != nullptr) replication.follow = "sim://primary";
  replication.dial = [this](const std::string&) -> absl::StatusOr<std::shared_ptr<transport::Channel>> {
    return std::make_shared<PeerChannel>(world_, node_->primary(), &node_->primary_path(), node_->follow_stream());
  };
  replication_ = std::make_unique<Replication>(std::move(replication), registry_.get(), data_.get(), world_);
  worker_ = std::make_unique<WorkerService>(registry_.get(), replication_.get());
  operator_ = std::make_unique<OperatorService>(registry_.get(), replication_.get());
  standbys_ = std::make_unique<ReplicationService>(replication_.get());
  peers_ = std::make_unique<PeerService>(registry_.get());
  dispatcher_ =
      std::make_unique<Dispatcher>(worker_.get(), operator_.get(), standbys_.get(), peers_.get(), replication_.get());
  const absl::Status recovered = replication_->Start();
  if (!recovered.ok()) return recovered;
  GW_RETURN_IF_ERROR(replication_->Run(absl::StrCat("server", id_), [](bool) {}));
  const absl::Status found = registry_->Find("sim").status();
  if (!found.ok() && !absl::IsNotFound(found)) {
    if (alive() && absl::IsDataLoss(found))
      world_->Violate(absl::StrCat("shard ", shard_, " cannot be recovered: ", found.ToString()));
    return found;
  }
  Tick();
  return absl::OkStatus();
}

std::shared_ptr<JobShard> ServerProcess::job() {
  auto job = registry_->Find("sim");
  return job.ok() ? *job : nullptr;
}

std::unique_ptr<UpdateSink> ServerProcess::AdoptJournal(std::unique_ptr<journal::Journal> journal) {
  journal_ = journal.get();
  return std::make_unique<Tap>(this, std::move(journal));
}

void ServerProcess::SchedulePump(TimeNs when) {
  if (pump_at_ >= 0 && pump_at_ <= when) return;
  pump_at_ = when;
  world_->At(when, [this, here = here_, when] {
    if (*here && alive() && pump_at_ == when) Pump();
  });
}

void ServerProcess::Pump() {
  pump_at_ = -1;
  const uint64_t removed = disk_.removed_segments();
  const TimeNs next = journal_->Pump();
  if (!alive()) return;
  if (disk_.removed_segments() > removed) world_->Count(Event::kJournalCut);
  const journal::JournalStatus status = journal_->status();
  if (status.degraded && !was_degraded_) {
    world_->Trace([&] { return absl::StrCat("shard ", shard_, ": the journal is degraded: ", status.reason); });
    world_->Count(setup_->waits_for_disk() ? Event::kDiskFullWaits : Event::kDegradedGoesOn);
  }
  if (!status.degraded && was_degraded_) world_->Count(Event::kJournalHealed);
  was_degraded_ = status.degraded;
  // Rounds that wait are the bound of the backlog; with the policy to go on it is the job's limit.
  const uint64_t limit = setup_->waits_for_disk() ? 64 * setup_->slices() * 1024 : job()->memory().journal;
  if (status.backlog_bytes > limit)
    world_->Violate(
        absl::StrCat("shard ", shard_, ": ", status.backlog_bytes, " bytes wait for the disk, the bound is ", limit));
  if (next < INT64_MAX) SchedulePump(std::max(next, world_->Now() + kMs));
}

void ServerProcess::ScheduleTick(TimeNs when) {
  if (tick_at_ > world_->Now() && tick_at_ <= when) return;
  tick_at_ = when;
  world_->At(when, [this, here = here_, when] {
    if (*here && alive() && tick_at_ == when) Tick();
  });
}

void ServerProcess::Tick() {
  TimeNs next = world_->Now() + kTick;
  if (const auto shard = job()) {
    const int before = shard->Describe(true, false).workers_size();
    registry_->Tick();
    replication_->Tick();
    if (serving() && HasStandbyInSync()) world_->Count(Event::kStandbyInSync);
    if (shard->Describe(true, false).workers_size() < before) {
      world_->Count(Event::kLeaseExpired);
      world_->Trace([&] { return absl::StrCat("shard ", shard_, ": a lease expired"); });
    }
    const uint64_t short_rounds = shard->Describe(false, false).rounds().short_rounds();
    for (; short_rounds_ < short_rounds; ++short_rounds_) world_->Count(Event::kShortRound);
    if (shard->log().Bytes() > 4 * setup_->segment_bytes && world_->Chance(0.3)) TakeSnapshot();
    if (const std::optional<TimeNs> due = shard->NextTick()) next = std::clamp(*due, world_->Now() + kMs, next);
  }
  ScheduleTick(next);
}

void ServerProcess::TakeSnapshot() {
  const auto shard = job();
  if (shard == nullptr) return;
  SnapshotFiles files(&disk_, data_->SnapshotsOf("sim"), &shard->job(), &shard->layout(), shard_);
  // It cannot wait for a round that has begun to close: nothing happens meanwhile here.
  const absl::Status taken =
      gradwire::TakeSnapshot(*shard, files, absl::ZeroDuration(), [](const auto& work) { return work(); });
  if (!alive()) return;
  world_->Trace([&] { return absl::StrCat("shard ", shard_, ": snapshot: ", taken.ToString()); });
  if (taken.ok()) world_->Count(Event::kSnapshotTaken);
}

bool ServerProcess::HasStandbyInSync() {
  const auto shard = job();
  if (shard == nullptr || !setup_->standbys) return false;
  const v1::JobStatus status = shard->Describe(false, false);
  return status.followers_size() > 0 && status.followers(0).in_sync();
}

void ServerProcess::TakeReplicationTurns() {
  const TimeNs due = replication_->TakeTurns();
  if (due == INT64_MAX || (replicate_at_ > world_->Now() && replicate_at_ <= due)) return;
  replicate_at_ = due;
  world_->At(due, [] {});  // this is called behind every event
}

void ServerProcess::Check() {
  if (setup_->standbys) TakeReplicationTurns();
  const auto shard = job();
  if (shard == nullptr || !alive() || !serving()) return;
  CheckMemory(world_, *shard, kFrameLimitBytes, absl::StrCat("shard ", shard_));
  CheckParameters(*shard);
  TakeNormTurns(*shard);
}

void ServerProcess::TakeNormTurns(JobShard& shard) {
  if (shard.agreement() == nullptr) return;
  NormExchange* const exchange = &shard.agreement()->exchange();
  if (shard.agreement()->HasWork() && !norms_scheduled_) {
    norms_scheduled_ = true;
    world_->After(world_->Between(0, 2 * kMs), [this, here = here_] {
      if (!*here || !alive()) return;
      norms_scheduled_ = false;
      if (const auto shard = job()) shard->agreement()->Pump();
    });
  }
  for (;;) {
    const Telling::Next next = exchange->TakeNext(/*unproven=*/true, AsTime(world_->Now()));
    if (next.to) {
      TellPeer(*exchange, *next.to);
      continue;
    }
    if (next.due == absl::InfiniteFuture()) return;
    const TimeNs due = absl::ToUnixNanos(next.due);
    if (tell_at_ > world_->Now() && tell_at_ <= due) return;
    tell_at_ = due;
    return world_->At(due, [] {});  // this is called behind every event
  }
}

void ServerProcess::TellPeer(NormExchange& exchange, size_t to) {
  const std::optional<NormExchange::Question> question = exchange.Begin(to);
  if (!question) return exchange.Ended(to, true, AsTime(world_->Now()));
  ServerNode* const peer = (*servers_)[to].get();
  Call(
      world_, &node_->path(static_cast<uint32_t>(to)),
      [peer] { return peer->process() == nullptr ? Target() : peer->process()->target(); }, "gradwire.v1.Peer/Exchange",
      broken_ == Broken::kFate ? WithoutFate<v1::ExchangeRequest>(question->request) : question->request, kPeerTimeout,
      [this, here = here_, to, key = question->key](const absl::StatusOr<std::string>& reply) {
        const auto shard = *here && alive() ? job() : nullptr;
        if (shard == nullptr) return;
        const absl::Time now = AsTime(world_->Now());
        absl::Status told = reply.status();
        if (reply.ok()) {
          const std::string heard = broken_ == Broken::kFate ? WithoutFate<v1::ExchangeReply>(*reply) : *reply;
          told = shard->agreement()->exchange().Answered(to, key, heard, now);
        }
        world_->Trace([&] {
          return absl::StrCat("shard ", shard_, " told norms of round ", key.first, " phase ", key.second, " to shard ",
                              to, ": ", told.ToString());
        });
        world_->Count(told.ok() ? Event::kShardsAgreed : Event::kPeerNotTold);
        shard->agreement()->exchange().Ended(to, told.ok(), now);
      });
}

void ServerProcess::CheckParameters(JobShard& shard) {
  if (oracle_ == nullptr || !shard.HasParameters()) return;
  const uint64_t version = shard.NewestVersion();
  if (version == checked_ || shard.Describe(false, false).version() != version) return;
  checked_ = version;
  const auto digest = shard.digest().Get();
  if (!digest.ok()) return world_->Violate(absl::StrCat("shard ", shard_, ": ", digest.status().ToString()));
  oracle_->CheckDigest(shard_, version, *digest, absl::StrCat("shard ", shard_, " itself"));
}

void ServerProcess::DropStreams(bool silently) {
  for (const auto& weak : streams_) {
    const auto stream = weak.lock();
    if (stream == nullptr) continue;
    stream->ServerGone(silently ? world_->Between(kSecond, kKeepalive) : world_->Between(kUs, 5 * kMs));
  }
  streams_.clear();
}

void ServerProcess::Replaced() {
  DropStreams(/*silently=*/false);
  disk_.Die();
  oracle_ = nullptr;
}

ServerNode::ServerNode(World* world, const Setup* setup, Oracle* oracle, uint32_t shard, Broken broken,
                       std::vector<std::unique_ptr<ServerNode>>* servers, ServerNode* primary)
    : world_(world),
      setup_(setup),
      oracle_(oracle),
      shard_(shard),
      broken_(broken),
      servers_(servers),
      primary_(primary),
      paths_(setup->shards) {
  disk_.CreateDirectory("/machine").IgnoreError();
  disk_.SyncDirectory("").IgnoreError();
}

void ServerNode::Start() {
  if (process_ != nullptr || lost_) return;
  ++starts_;
  process_ = std::make_unique<ServerProcess>(world_, setup_, oracle_, this, shard_, starts_, broken_, servers_);
  const uint64_t truncated = process_->disk().truncated();
  const absl::Status started = process_->Start();
  if (!started.ok() || !process_->alive()) {
    world_->Trace([&] { return absl::StrCat("shard ", shard_, ": the server does not start: ", started.ToString()); });
    if (!process_->alive()) return;  // Settle
    process_ = nullptr;
    return world_->After(200 * kMs, [this] { Start(); });
  }
  if (process_->disk().truncated() > truncated) world_->Count(Event::kTornTailCut);
  if (process_->serving()) TellRecovered();
}

void ServerNode::TellRecovered() {
  uint64_t version = 0;
  if (const auto job = process_->job()) {
    const v1::JobStatus status = job->Describe(false, true);
    version = status.version();
    if (status.durability().snapshot_version() > 0) world_->Count(Event::kRecoveredFromSnapshot);
    if (setup_->job->two_phase() && version % 2 == 1) world_->Count(Event::kRecoveredWithinStep);
  }
  world_->Trace([&] { return absl::StrCat("shard ", shard_, ": server ", starts_, " is up at version ", version); });
  const std::optional<TimeNs> synced_until =
      power_lost_at_ ? std::min(*power_lost_at_, stopped_at_.value_or(*power_lost_at_)) : power_lost_at_;
  const bool may_lose = may_lose_versions_ || (power_lost_at_.has_value() && setup_->may_lose_versions());
  const std::optional<TimeNs> kept = disk_was_well_ ? synced_until : std::nullopt;
  if (setup_->async()) {
    const auto job = process_->job();
    const std::vector<uint64_t> versions =
        job == nullptr ? std::vector<uint64_t>(setup_->layout->bucket_count(shard_)) : job->log().SafeVersions();
    oracle_->RecoveredAsync(shard_, versions, process_->epoch(), may_lose, kept);
  } else {
    oracle_->Recovered(shard_, version, process_->epoch(), may_lose, kept);
  }
  power_lost_at_.reset();
  stopped_at_.reset();
}

absl::Status ServerNode::Promote() {
  if (process() == nullptr) return absl::UnavailableError("it is down");
  const absl::Status promoted = process_->replication().Promote(broken_ == Broken::kPromotion).status();
  world_->Trace([&] { return absl::StrCat("shard ", shard_, ": promotion: ", promoted.ToString()); });
  if (promoted.ok() && process_->alive()) TellRecovered();
  return promoted;
}

void ServerNode::Lose() {
  world_->Trace([&] { return absl::StrCat("shard ", shard_, ": the machine is lost"); });
  lost_ = true;
  if (process_ == nullptr) return;
  process_->DropStreams(world_->Chance(0.2));
  process_ = nullptr;
}

void ServerNode::ComeBack() {
  lost_ = false;
  Start();
}

void ServerNode::CutOff(TimeNs own_delay, TimeNs primary_delay) {
  if (const auto stream = follow_stream_.lock()) stream->Break(own_delay, primary_delay);
}

void ServerNode::Kill(bool power, TimeNs away, bool leave_old) {
  world_->Trace([&] {
    return absl::StrCat("shard ", shard_, ": ", power ? "power lost" : "server killed", ", back in ", away / kMs,
                        " ms");
  });
  if (!stopped_at_) stopped_at_ = world_->Now();
  if (power) {
    std::mt19937 random(static_cast<uint32_t>(world_->Below(UINT32_MAX)));
    disk_.PowerCycle(random);
    if (!power_lost_at_) power_lost_at_ = world_->Now();
  }
  if (process_ != nullptr && leave_old) {
    process_->Replaced();
    replaced_ = std::move(process_);
  } else if (process_ != nullptr) {
    process_->DropStreams(world_->Chance(0.2));
    process_ = nullptr;
  }
  world_->After(away, [this] { Start(); });
}

void ServerNode::Settle() {
  if (process_ == nullptr) return;
  if (process_->alive()) return process_->Check();
  Kill(disk_.crashed(), world_->Between(kMs, kSecond));
}

void ServerNode::HealDisk() {
  disk_.set_capacity(UINT64_MAX);
  disk_.set_sync_error(absl::OkStatus());
  disk_.set_write_error(absl::OkStatus());
}

}  // namespace gradwire::sim

// Joining, starting, heartbeats and mending, as Starter and ShardLink have them; see worker_node.h.
#include "tests/sim/worker_link.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/internal/start.h"
#include "common/codec/frame/parameters.h"
#include "tests/sim/chunks.h"

namespace gradwire::sim {
namespace {

constexpr TimeNs kReconnectTimeout = 60 * kSecond;
constexpr TimeNs kFirstBackoff = 50 * kMs;
constexpr TimeNs kLastBackoff = kSecond;
constexpr int kMaxJoinPasses = 8;

}  // namespace

void LinkEnd::OnMessage(const transport::Message& message) {
  const auto session = session_.lock();
  if (session == nullptr) return;
  session->Guarded([this, session, message] {
    if (session->links_[shard_]->connection != connection_) return;
    if (push_) {
      v1::PushAck ack;
      if (!ack.ParseFromString(message.control)) return session->world_->Violate("an acknowledgement cannot be parsed");
      if (ack.outcome() != v1::PUSH_OUTCOME_UNSPECIFIED) session->OnAck(shard_, ack);
      if (!session->over_ && ack.kind() != v1::PULL_UNSPECIFIED) Take(*session, ack, ack.round() + 1, message);
    } else {
      v1::PullMessage pull;
      if (!pull.ParseFromString(message.control)) return session->world_->Violate("an answer cannot be parsed");
      Take(*session, pull, pull.version(), message);
    }
  });
}

template <typename Control>
void LinkEnd::Take(WorkerSession& session, const Control& control, uint64_t version,
                   const transport::Message& message) {
  std::vector<wire::Chunk>& open = open_[{control.bucket(), control.kind()}];
  if (!message.frame.empty()) {
    absl::StatusOr<wire::Chunk> chunk = wire::ParseChunk(wire::Flatten(message.frame));
    if (!chunk.ok()) return session.world_->Violate(absl::StrCat("an answer: ", chunk.status().ToString()));
    open.push_back(*std::move(chunk));
  }
  if (!control.last() && control.code() == 0) return;
  std::vector<wire::Chunk> chunks = std::move(open);
  open_.erase({control.bucket(), control.kind()});
  const absl::Status status(static_cast<absl::StatusCode>(control.code()), std::string(control.message()));
  session.OnAnswer(shard_, control.kind(), control.bucket(), version, status, std::move(chunks));
}

void LinkEnd::OnClosed(const absl::Status& status) {
  const auto session = session_.lock();
  if (session == nullptr) return;
  const absl::Status why =
      status.ok() || absl::IsCancelled(status) ? absl::UnavailableError("the server ended the stream") : status;
  session->Guarded([this, session, why] { session->OnBroken(shard_, connection_, why); });
}

void WorkerSession::Start() {
  world_->Trace([&] { return absl::StrCat(node_->name(), ": incarnation ", incarnation_, " starts"); });
  for (uint32_t shard = 0; shard < setup_->shards; ++shard) {
    links_.push_back(std::make_unique<Link>());
    links_.back()->answers.resize(setup_->layout->bucket_count(shard));
  }
  JoinNext(0, 0, kFirstBackoff);
}

v1::JoinRequest WorkerSession::RequestTo(uint32_t shard) const {
  v1::JoinRequest request;
  request.mutable_identity()->set_job("sim");
  request.mutable_identity()->set_worker(node_->name());
  request.mutable_identity()->set_incarnation(incarnation_);
  *request.mutable_spec() = setup_->job->spec();
  request.set_shard_index(shard);
  request.set_shard_count(setup_->shards);
  request.set_layout_digest(setup_->layout->digest());
  request.set_may_initialize(may_initialize_ || shard == 0);
  for (uint32_t s = 0; s < setup_->shards; ++s) request.add_shards(absl::StrCat("sim://", s));
  return request;
}

void WorkerSession::JoinNext(uint32_t shard, int pass, TimeNs backoff) {
  if (over_) return;
  for (; pass > 0 && shard < setup_->shards && links_[shard]->start == version_; ++shard) {
  }
  if (shard == setup_->shards) {
    const bool agreed = std::all_of(links_.begin(), links_.end(), [&](const auto& l) { return l->start == version_; });
    if (!agreed && pass + 1 == kMaxJoinPasses) return Fail(absl::AbortedError("the shards do not agree on a start"));
    if (!agreed) return JoinNext(0, pass + 1, kFirstBackoff);
    started_ = true;
    return StartStep();
  }
  v1::JoinRequest request = RequestTo(shard);
  request.set_start_version(version_);
  ServerNode* const server = &node_->server(shard);
  Call(
      world_, &node_->path(shard), [server] { return TargetOf(server->process()); }, "gradwire.v1.Worker/Join",
      request.SerializeAsString(), kCallTimeout,
      [self = shared_from_this(), shard, pass, backoff](const absl::StatusOr<std::string>& reply) {
        self->Guarded([self, shard, pass, backoff, reply] {
          v1::JoinReply parsed;
          if (reply.ok() && parsed.ParseFromString(*reply)) return self->Joined(shard, pass, parsed);
          if (!Retryable(reply.status())) return self->Fail(reply.status());
          self->Later(backoff, [raw = self.get(), shard, pass, backoff] {
            raw->JoinNext(shard, pass, std::min(2 * backoff, kLastBackoff));
          });
        });
      });
}

void WorkerSession::Joined(uint32_t shard, int pass, const v1::JoinReply& reply) {
  Link& link = *links_[shard];
  link.joined = true;
  link.start = reply.start_version();
  link.epoch = reply.server_epoch();
  link.lineage = reply.lineage();
  link.must_initialize = reply.must_initialize();
  version_ = std::max(version_, link.start);
  if (shard == 0 && reply.must_initialize()) may_initialize_ = true;
  if (pass == 0) {
    OpenStreams(shard);
    if (over_) return;
    link.last_beat = world_->Now();
    Heartbeat(shard);
  }
  JoinNext(shard + 1, pass, kFirstBackoff);
}

void WorkerSession::StartStep() {
  if (over_ || !started_ || training()) return;
  const auto all = [this](uint32_t shard) { return setup_->layout->bucket_count(shard); };
  bool complete = true;
  // All workers begin with the same values, so whoever pulled those of shard 0 may upload what others have none of.
  const bool same_as_first =
      version_ == 0 && links_[0]->pulling && links_[0]->answered == all(0) && !links_[0]->trained;
  may_initialize_ = may_initialize_ || same_as_first;
  for (uint32_t shard = 0; shard < setup_->shards; ++shard) {
    Link& link = *links_[shard];
    const bool upload = version_ == 0 && link.must_initialize;
    if (upload && !link.uploading && (shard == 0 || links_[0]->uploaded == all(0) || same_as_first)) {
      link.uploading = true;
      Upload(shard);
    }
    if (!link.pulling && (link.refused || !(upload || link.uploading))) {
      link.pulling = true;
      RequestPull(shard, client::StartKind(*setup_->job, setup_->pull), version_);
    }
    complete = complete && (link.pulling ? link.answered : link.uploaded) == all(shard);
  }
  if (complete) FinishStart();
}

void WorkerSession::Upload(uint32_t shard) {
  for (uint32_t b = 0; b < setup_->layout->bucket_count(shard); ++b) {
    const BucketLayout& slice = setup_->layout->at(b, shard);
    const std::vector<float> values = replica_->Gather(slice);
    SendTo(shard, Rechunk(EncodeInitialize(slice, incarnation_, values.data()), setup_->chunk_bytes), {}, std::nullopt);
  }
}

void WorkerSession::RequestPull(uint32_t shard, v1::PullKind kind, uint64_t version) {
  RequestPull(shard, kind, version, 0, setup_->layout->bucket_count(shard));
}

void WorkerSession::RequestPull(uint32_t shard, v1::PullKind kind, uint64_t version, uint32_t bucket, uint32_t count) {
  v1::PullRequest request;
  request.set_kind(kind);
  request.set_version(version);
  request.set_bucket_begin(bucket);
  request.set_bucket_end(bucket + count);
  if (links_[shard]->pull != nullptr) links_[shard]->pull->Send({request.SerializeAsString(), {}}).IgnoreError();
}

void WorkerSession::FinishStart() {
  std::vector<PlanWindow> plans;
  std::vector<uint64_t> versions;
  for (uint32_t slice = 0; slice < setup_->slices(); ++slice) {
    Link& link = *links_[setup_->LayoutOf(slice).shard];
    versions.push_back(version_);
    if (!link.pulling) {
      plans.emplace_back(PlansKept(*setup_->job), setup_->codecs[slice]->InitialPlan());
      continue;
    }
    const std::vector<wire::Chunk>& answer = link.answers[setup_->LayoutOf(slice).bucket];
    versions.back() = VersionOf(answer);
    auto loaded = replica_->Load(setup_->LayoutOf(slice), answer, versions.back());
    if (!loaded.ok()) return world_->Violate(absl::StrCat("the parameters of a start: ", loaded.status().ToString()));
    plans.push_back(*std::move(loaded));
  }
  world_->Trace([&] { return absl::StrCat(node_->name(), ": starts at version ", version_); });
  for (uint32_t shard = 0; shard < setup_->shards; ++shard) {
    if (Outlived(shard)) continue;
    for (const uint32_t slice : setup_->layout->slices_of(shard)) {
      if (links_[shard]->pulling && versions[slice] > 0) node_->oracle()->Seen({versions[slice] - 1, slice}, {});
      if (setup_->async())
        node_->oracle()->CheckSlice(slice, versions[slice], replica_->Gather(setup_->LayoutOf(slice)),
                                    node_->name() + " at its start");
    }
    if (setup_->async()) continue;
    node_->oracle()->CheckDigest(shard, version_, replica_->ShardDigest(shard), node_->name() + " at its start");
  }
  if (setup_->async()) return StartAsync(std::move(plans), versions);
  work_ = std::make_unique<client::SliceWork>(
      client::SliceContext{setup_->job.get(), setup_->layout.get(), setup_->pull, incarnation_, setup_->CodecPointers(),
                           replica_.get(), gradients_.get()},
      std::move(plans));
  client::RoundLedger::Rules rules;
  rules.slices = setup_->layout->slices();
  for (uint32_t slice = 0; slice < setup_->slices(); ++slice) rules.updates.push_back(work_->UpdateKind(slice));
  rules.parameters = work_->ParametersKind();
  rules.skips = work_->skips();
  ledger_ = std::make_unique<client::RoundLedger>(std::move(rules), version_);
  BeginRound(/*again=*/false);
}

void WorkerSession::OpenStreams(uint32_t shard) {
  Link& link = *links_[shard];
  ServerProcess* const server = node_->server(shard).process();
  ++link.connection;
  if (server == nullptr) {
    link.connected = true;
    return OnBroken(shard, link.connection, absl::UnavailableError("connection refused"));
  }
  const std::weak_ptr<WorkerSession> self = weak_from_this();
  ServerNode* const node = &node_->server(shard);
  const auto open = [&](bool push) {
    auto stream = std::make_shared<SimStream>(world_, &node_->path(shard));
    link.ends.push_back(std::make_shared<LinkEnd>(self, shard, link.connection, push));
    server->Adopt(stream);
    stream->Open(server->target().service, push ? "gradwire.v1.Worker/Push" : "gradwire.v1.Worker/Pull",
                 link.ends.back(),
                 [node, id = server->id()] { return node->process() != nullptr && node->process()->id() == id; });
    return stream;
  };
  link.push = open(true);
  link.pull = open(false);
  link.connected = true;
  v1::PushMessage push_open;
  *push_open.mutable_open() = RequestTo(shard).identity();
  link.push->Send({push_open.SerializeAsString(), {}}).IgnoreError();
  v1::PullRequest pull_open;
  *pull_open.mutable_open() = RequestTo(shard).identity();
  link.pull->Send({pull_open.SerializeAsString(), {}}).IgnoreError();
}

bool WorkerSession::SendTo(uint32_t shard, const std::vector<Bytes>& chunks, const std::vector<v1::PullKind>& pull,
                           std::optional<uint64_t> round, bool whole) {
  Link& link = *links_[shard];
  if (!link.connected) return false;
  v1::PushMessage last;
  for (v1::PullKind kind : pull) last.add_pull(kind);
  const auto send = [&](const Bytes& chunk) {
    link.push->Send({&chunk == &chunks.back() ? last.SerializeAsString() : std::string(), {chunk}}).IgnoreError();
  };
  if (round && world_->Chance(node_->repeat)) {
    world_->Count(Event::kFrameRepeated);
    node_->repeated = true;
    for (const Bytes& chunk : chunks) send(chunk);
  } else if (round && world_->Chance(node_->flip)) {
    world_->Count(Event::kFrameFlipped);
    node_->oracle()->Damaged(*round);
    const Bytes& chunk = chunks[world_->Below(chunks.size())];
    std::vector<uint8_t> bytes(chunk.span().begin(), chunk.span().end());
    bytes[world_->Below(bytes.size())] ^= static_cast<uint8_t>(1u << world_->Below(8));
    std::vector<Bytes> damaged = chunks;
    damaged[static_cast<size_t>(&chunk - chunks.data())] = Bytes::FromVector(std::move(bytes));
    for (const Bytes& c : damaged)
      link.push->Send({&c == &damaged.back() ? last.SerializeAsString() : std::string(), {c}}).IgnoreError();
    return true;
  } else if (round && !whole && chunks.size() > 1 && world_->Chance(node_->chunk_fault)) {
    node_->oracle()->Damaged(*round);
    return SendBadly(shard, chunks.size(), [&](size_t i) { send(chunks[i]); });
  }
  for (const Bytes& chunk : chunks) send(chunk);
  return true;
}

// The last chunk always comes, as the last one, unless the connection breaks: transports lose nothing without that.
bool WorkerSession::SendBadly(uint32_t shard, size_t chunks, const std::function<void(size_t)>& send) {
  const size_t at = world_->Below(chunks - 1);
  static constexpr Event kKinds[] = {Event::kChunkLost, Event::kChunkRepeated, Event::kChunksSwapped,
                                     Event::kFrameBegunAnew, Event::kCutInFrame};
  const Event kind = kKinds[world_->Below(std::size(kKinds))];
  if (kind == Event::kChunksSwapped && at + 2 >= chunks) return SendBadly(shard, chunks, send);
  world_->Count(kind);
  if (kind == Event::kFrameBegunAnew || kind == Event::kCutInFrame)
    for (size_t i = 0; i <= at; ++i) send(i);
  if (kind == Event::kCutInFrame) {
    // The server has a part of it by then, or not.
    world_->After(world_->Between(20 * kUs, 3 * kMs),
                  [world = world_, push = links_[shard]->push, pull = links_[shard]->pull] {
                    for (const auto& stream : {push, pull})
                      stream->Break(world->Between(kUs, 20 * kMs), world->Between(kUs, 20 * kMs));
                  });
    return true;
  }
  for (size_t i = 0; i < chunks; ++i) {
    if (kind == Event::kChunkLost && i == at) continue;
    const bool swapped = kind == Event::kChunksSwapped && (i == at || i == at + 1);
    send(swapped ? 2 * at + 1 - i : i);
    if (kind == Event::kChunkRepeated && i == at) send(i);
  }
  return true;
}

void WorkerSession::Heartbeat(uint32_t shard) {
  if (over_) return;
  const TimeNs period = setup_->job->spec().lease_ms() * kMs / 3;
  Link& link = *links_[shard];
  if (!link.connected) return Later(period, [this, shard] { Heartbeat(shard); });
  v1::HeartbeatRequest request;
  *request.mutable_identity() = RequestTo(shard).identity();
  request.set_may_initialize(may_initialize_ || shard == 0);
  ServerNode* const server = &node_->server(shard);
  Call(
      world_, &node_->path(shard), [server] { return TargetOf(server->process()); }, "gradwire.v1.Worker/Heartbeat",
      request.SerializeAsString(), std::min(kCallTimeout, period),
      [self = shared_from_this(), shard, connection = link.connection](const absl::StatusOr<std::string>& reply) {
        self->Guarded([self, shard, connection, reply] {
          Link& link = *self->links_[shard];
          if (link.connection != connection || !link.connected) return;
          v1::HeartbeatReply parsed;
          if (reply.ok()) {
            link.last_beat = self->world_->Now();
            if (parsed.ParseFromString(*reply) && parsed.must_initialize()) {
              if (shard == 0) self->may_initialize_ = true;
              link.must_initialize = true;
              self->StartStep();
            }
          } else if (!Retryable(reply.status())) {
            self->OnBroken(shard, connection, reply.status());
          } else if (self->world_->Now() - link.last_beat > self->setup_->job->spec().lease_ms() * kMs) {
            self->OnBroken(shard, connection, absl::UnavailableError("no answer to heartbeats for a whole lease"));
          }
        });
      });
  Later(period, [this, shard] { Heartbeat(shard); });
}

void WorkerSession::Break(uint32_t shard, TimeNs client_delay, TimeNs server_delay) {
  if (shard < links_.size()) links_[shard]->Drop(client_delay, server_delay);
}

void WorkerSession::OnBroken(uint32_t shard, uint64_t connection, const absl::Status& status) {
  Link& link = *links_[shard];
  if (link.connection != connection || !link.connected) return;
  link.connected = false;
  link.Drop(0, world_->Between(kUs, 20 * kMs));
  // As ShardLink, and ResumeAt of a Starter and of an Exchange. A damaged frame ends its stream, which is mended too.
  const bool damage = absl::IsDataLoss(status) || absl::IsInvalidArgument(status);
  if (!(Mendable(status) || damage) || !training()) return Fail(status);
  world_->Trace([&] { return absl::StrCat(node_->name(), ": lost shard ", shard, ": ", status.ToString()); });
  Later(10 * kMs, [this, shard] { Mend(shard, world_->Now() + kReconnectTimeout, kFirstBackoff); });
}

void WorkerSession::SetResumePoint(uint32_t shard, v1::JoinRequest* request) const {
  if (async_) {
    const client::ResumePoint point = async_->ResumeAt(shard).value_or(client::ResumePoint());
    request->mutable_resume_versions()->Assign(point.versions.begin(), point.versions.end());
  } else {
    request->set_resume_round(ledger_->round());
    const std::vector<uint32_t> seen = ledger_->SeenBuckets(shard);
    request->mutable_resume_seen()->Assign(seen.begin(), seen.end());
  }
  request->set_known_epoch(links_[shard]->epoch);
  request->set_known_lineage(links_[shard]->lineage);
}

void WorkerSession::Mend(uint32_t shard, TimeNs deadline, TimeNs backoff) {
  v1::JoinRequest request = RequestTo(shard);
  request.set_resume(true);
  SetResumePoint(shard, &request);
  ServerNode* const server = &node_->server(shard);
  // An old server that lives on may be the one that is reached.
  const bool old = server->replaced() != nullptr && world_->Chance(0.5);
  Call(
      world_, &node_->path(shard), [server, old] { return TargetOf(old ? server->replaced() : server->process()); },
      "gradwire.v1.Worker/Join", request.SerializeAsString(), kCallTimeout,
      [self = shared_from_this(), shard, deadline, backoff, round = request.resume_round(),
       known = request.known_epoch(), old](const absl::StatusOr<std::string>& reply) {
        self->Guarded([self, shard, deadline, backoff, round, known, old, reply] {
          v1::JoinReply parsed;
          if (reply.ok() && parsed.ParseFromString(*reply) && self->Joined(shard, known, parsed))
            return self->Mended(shard, round, known, old, parsed);
          if (!reply.ok() && (!Retryable(reply.status()) || self->world_->Now() >= deadline))
            return self->JoinRefused(reply.status(), old);
          self->Later(backoff, [raw = self.get(), shard, deadline, backoff] {
            raw->Mend(shard, deadline, std::min(2 * backoff, kLastBackoff));
          });
        });
      });
}

bool WorkerSession::Joined(uint32_t shard, uint64_t known, const v1::JoinReply& reply) {
  Link& link = *links_[shard];
  if (reply.server_epoch() < known) world_->Violate("a server that was replaced took a worker back");
  if (reply.server_epoch() < link.epoch) return false;  // catching up and mending overtook each other
  link.epoch = reply.server_epoch();
  link.lineage = reply.lineage();
  return true;
}

void WorkerSession::Mended(uint32_t shard, uint64_t round, uint64_t known, bool old, const v1::JoinReply& reply) {
  Link& link = *links_[shard];
  world_->Trace([&] {
    return absl::StrCat(node_->name(), ": shard ", shard, " takes it back in round ", reply.start_version());
  });
  world_->Count(reply.server_epoch() == known ? Event::kResumed : Event::kResumedAfterRestart);
  link.last_beat = world_->Now();
  if (old) {  // it ends before the streams are open
    link.connected = true;
    return OnBroken(shard, ++link.connection, absl::UnavailableError("the old server ended"));
  }
  OpenStreams(shard);
  if (over_) return;
  if (async_) {
    async_->OnResumed(shard, /*behind=*/false);
    return PollAsync();
  }
  ++resumed_;
  if (reply.start_version() != round) {
    world_->Count(Event::kRoundOverAtResume);
    ledger_->Dropped();
  }
  for (Entry entry : ledger_->Unanswered(shard)) {
    world_->Count(Event::kResentFrames);
    SendAgain(entry);
  }
  GoOn();
  if (!agreed_.empty()) AgreeToCatchUp();  // the shard waits for it again
}

void WorkerSession::JoinRefused(const absl::Status& status, bool old) {
  if (absl::IsDataLoss(status)) {
    world_->Count(Event::kDataLossTold);
    if (!setup_->may_lose_versions())
      world_->Violate(absl::StrCat("a worker is told of lost versions: ", status.ToString()));
  }
  if (absl::IsFailedPrecondition(status) && old) world_->Count(Event::kEpochFenced);
  // Once it trains, the parameters that it began with are as safe as any version.
  if (absl::StrContains(status.message(), "no parameters yet") && !setup_->may_lose_versions())
    world_->Violate(absl::StrCat(node_->name(), " cannot go on: ", status.ToString()));
  Fail(status);
}

}  // namespace gradwire::sim

// How a worker goes on whose shards are rounds ahead, as Exchange has it; see worker_node.h.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "client/cpp/internal/start.h"
#include "tests/sim/chunks.h"
#include "tests/sim/worker_link.h"

namespace gradwire::sim {
namespace {

constexpr uint64_t kFollowedVersions = 3;
constexpr TimeNs kPause = 100 * kMs;
constexpr int kMaxPasses = 8;

}  // namespace

void WorkerSession::CatchUp() {
  world_->Trace(
      [&] { return absl::StrCat(node_->name(), ": round ", ledger_->round() - 1, " is over, it catches up"); });
  by_updates_ = work_->ParametersKind() == v1::PULL_UNSPECIFIED && !ledger_->AnyGone() && ledger_->next() > 1;
  AgreeToCatchUp();
}

void WorkerSession::AgreeToCatchUp() {
  catching_.reset();
  ++catch_up_;
  by_updates_ = by_updates_ && !ledger_->AnyGone();
  agreed_.assign(setup_->shards, std::nullopt);
  AgreeNext(0, 0, 0);
}

void WorkerSession::AgreeNext(uint32_t shard, int pass, uint64_t version) {
  while (shard < setup_->shards && agreed_[shard] == version) ++shard;
  if (shard == setup_->shards) {
    const bool all = std::all_of(agreed_.begin(), agreed_.end(), [&](const auto& v) { return v == version; });
    if (all) return CatchUpTo(version);
    if (pass + 1 == kMaxPasses) return Fail(absl::AbortedError("the shards do not agree on a version to go on with"));
    return AgreeNext(0, pass + 1, version);
  }
  v1::JoinRequest request = RequestTo(shard);
  request.set_catch_up(true);
  request.set_start_version(version);
  SetResumePoint(shard, &request);
  ServerNode* const server = &node_->server(shard);
  Call(
      world_, &node_->path(shard), [server] { return TargetOf(server->process()); }, "gradwire.v1.Worker/Join",
      request.SerializeAsString(), kCallTimeout,
      [self = shared_from_this(), shard, pass, version, known = request.known_epoch(),
       attempt = catch_up_](const absl::StatusOr<std::string>& reply) {
        self->Guarded([self, shard, pass, version, known, attempt, reply] {
          if (attempt != self->catch_up_) return;
          v1::JoinReply parsed;
          if (reply.ok() && parsed.ParseFromString(*reply) && self->Joined(shard, known, parsed)) {
            self->agreed_[shard] = parsed.start_version();
            self->world_->Trace([&] {
              return absl::StrCat(self->node_->name(), ": may catch up with version ", parsed.start_version(),
                                  " of shard ", shard, ", asked for ", version);
            });
            return self->AgreeNext(shard + 1, pass, std::max(version, parsed.start_version()));
          }
          if (!reply.ok() && !Mendable(reply.status())) return self->JoinRefused(reply.status(), /*old=*/false);
          // Its link is being mended, or will be lost.
          self->Later(kPause, [raw = self.get(), attempt] {
            if (attempt == raw->catch_up_) raw->AgreeToCatchUp();
          });
        });
      });
}

void WorkerSession::CatchUpTo(uint64_t version) {
  by_updates_ = by_updates_ && version <= ledger_->round() + kFollowedVersions + setup_->staleness();
  Catching wanted;
  wanted.resumed = resumed_;
  wanted.kind = by_updates_ ? v1::PULL_UPDATE : client::StartKind(*setup_->job, setup_->pull);
  wanted.last = version;
  wanted.first = by_updates_ ? ledger_->round() + 1 : version;
  wanted.missing = (version + 1 - std::min(wanted.first, version + 1)) * setup_->slices();
  wanted.chunks.resize(wanted.missing);
  catching_ = std::move(wanted);
  for (uint32_t shard = 0; shard < setup_->shards; ++shard)
    for (uint64_t v = catching_->first; v <= version; ++v) RequestPull(shard, catching_->kind, v);
  if (catching_->missing == 0) TakeCaught();
}

void WorkerSession::OnCaught(uint32_t shard, v1::PullKind kind, uint32_t bucket, uint64_t version,
                             const absl::Status& status, std::vector<wire::Chunk> chunks) {
  Catching& catching = *catching_;
  if (kind != catching.kind || version < catching.first || version > catching.last) return;  // of an earlier attempt
  if (absl::IsOutOfRange(status)) {
    by_updates_ = false;
    return AgreeToCatchUp();
  }
  if (!status.ok()) return Fail(status);
  const uint32_t slice = setup_->layout->slice_of(bucket, shard);
  std::vector<wire::Chunk>& here = catching.chunks[(version - catching.first) * setup_->slices() + slice];
  if (!here.empty()) return;
  here = std::move(chunks);
  if (--catching.missing == 0) TakeCaught();
}

void WorkerSession::TakeCaught() {
  const Catching caught = std::move(*catching_);
  catching_.reset();
  agreed_.clear();
  const bool updates = caught.kind == v1::PULL_UPDATE;
  world_->Count(updates ? Event::kCaughtUpByUpdates : Event::kCaughtUpByParameters);
  for (uint32_t slice = 0; slice < setup_->slices(); ++slice) {
    const std::vector<float> residual = ResidualOf(slice);
    for (uint64_t v = caught.first; v <= caught.last; ++v) {
      const std::vector<wire::Chunk>& chunks = caught.chunks[(v - caught.first) * setup_->slices() + slice];
      if (!Outlived(setup_->LayoutOf(slice).shard))
        node_->oracle()->Seen({v - 1, slice}, updates ? BytesOf(chunks) : std::vector<Bytes>());
      const absl::Status taken = updates ? work_->Follow(slice, v - 1, chunks) : work_->Load(slice, v, chunks);
      if (!taken.ok()) return world_->Violate(absl::StrCat(node_->name(), ": catching up: ", taken.ToString()));
    }
    if (residual != ResidualOf(slice))
      world_->Violate(absl::StrCat(node_->name(), ": catching up changed the residual of slice ", slice));
    if (!Carries(ledger_->next() - 1)) work_->Keep(slice);
  }
  world_->Trace([&] { return absl::StrCat(node_->name(), ": has caught up with version ", caught.last); });
  if (caught.last > ledger_->round()) world_->Count(Event::kRoundsSkipped);
  for (uint32_t shard = 0; shard < setup_->shards; ++shard)
    if (!Outlived(shard))
      node_->oracle()->CheckDigest(shard, caught.last, replica_->ShardDigest(shard), node_->name() + ", caught up,");
  ledger_->MoveTo(caught.last);
  FinishStep();
}

}  // namespace gradwire::sim

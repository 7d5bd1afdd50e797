// The rounds of a worker whose job has asynchronous ones: AsyncExchange, called between events; see worker_node.h.
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/sim/chunks.h"
#include "tests/sim/worker_link.h"

namespace gradwire::sim {

absl::Status WorkerSession::AsyncLink::SendFrame(client::OutgoingFrame frame) {
  return session_->PushAsync(shard_, frame.chunks, frame.pull);
}

absl::Status WorkerSession::AsyncLink::RequestPull(v1::PullKind kind, uint64_t version, uint32_t bucket_begin,
                                                   uint32_t bucket_end) {
  if (!session_->links_[shard_]->connected) return absl::UnavailableError("there are no streams");
  session_->RequestPull(shard_, kind, version, bucket_begin, bucket_end - bucket_begin);
  return absl::OkStatus();
}

void WorkerSession::StartAsync(std::vector<PlanWindow> plans, const std::vector<uint64_t>& versions) {
  std::vector<client::FrameLink*> links;
  for (uint32_t shard = 0; shard < setup_->shards; ++shard) {
    async_links_.push_back(std::make_unique<AsyncLink>(this, shard));
    links.push_back(async_links_.back().get());
  }
  for (const std::vector<float>& tensor : memory_) fed_.emplace_back(tensor.size());
  async_ = std::make_unique<client::AsyncExchange>(
      client::SliceContext{setup_->job.get(), setup_->layout.get(), setup_->pull, incarnation_, setup_->CodecPointers(),
                           replica_.get(), gradients_.get()},
      std::move(links), versions, std::move(plans));
  BeginAsyncStep();
}

void WorkerSession::BeginAsyncStep() {
  world_->Trace([&] { return absl::StrCat(node_->name(), ": a step begins"); });
  const absl::Status begun = async_->Begin({&kLearningRate, 1});
  if (!begun.ok()) return Fail(begun);
  in_step_ = true;
  for (uint32_t t = 0; t < memory_.size(); ++t) {
    for (float& x : gradient_[t]) x = static_cast<float>(world_->Below(2001)) / 1000.0f - 1.0f;
    const bool bad = world_->Chance(node_->bad_gradient);
    if (bad) {
      world_->Count(Event::kBadGradient);
      gradient_[t][world_->Below(gradient_[t].size())] = std::numeric_limits<float>::quiet_NaN();
    }
    for (size_t i = 0; !bad && i < gradient_[t].size(); ++i) fed_[t][i] += gradient_[t][i];
    const absl::Status ready = async_->Ready(t, gradient_[t].data());
    if (!ready.ok()) return Fail(ready);
  }
  PollAsync();
}

void WorkerSession::PollAsync() {
  if (!in_step_ || over_) return;
  const absl::Status ended = async_->End(/*timeout_ms=*/0);
  if (absl::IsDeadlineExceeded(ended)) return;
  in_step_ = false;
  if (const absl::Status failed = async_->Plans().status(); !failed.ok()) return Fail(failed);
  // What was refused in it is no failure.
  world_->Count(Event::kAsyncStep);
  CheckAsync();
  Later(node_->TakeThink(), [this] { BeginAsyncStep(); });
}

absl::Status WorkerSession::PushAsync(uint32_t shard, const std::vector<Bytes>& chunks,
                                      const std::vector<v1::PullKind>& pull) {
  const absl::StatusOr<wire::FrameHeader> header = wire::ParseHeader(chunks[0].span());
  if (!header.ok()) return header.status();
  const std::vector<Bytes> cut = Rechunk(chunks, setup_->chunk_bytes);
  const Entry entry{header->round, setup_->layout->slice_of(header->bucket, shard)};
  const bool again = node_->oracle()->Pushed(member(), entry, cut);
  if (again) world_->Count(Event::kResentFrames);
  if (SendTo(shard, cut, pull, entry.round, /*whole=*/again)) return absl::OkStatus();
  return absl::UnavailableError("there are no streams");
}

void WorkerSession::OnAsyncAnswer(uint32_t shard, client::PullAnswer answer) {
  world_->Trace([&] {
    return absl::StrCat(node_->name(), ": shard ", shard, " bucket ", answer.bucket, ": ",
                        v1::PullKind_Name(answer.kind), " ", answer.status.ToString());
  });
  if (answer.status.ok() && !answer.chunks.empty() && !Outlived(shard)) {
    const uint64_t version = answer.chunks[0].header.round;
    const uint32_t slice = setup_->layout->slice_of(answer.bucket, shard);
    if (version > 0) node_->oracle()->Seen({version - 1, slice}, {});
  }
  async_->OnAnswer(shard, std::move(answer));
  PollAsync();
}

void WorkerSession::CheckAsync() {
  for (uint32_t shard = 0; shard < setup_->shards; ++shard)
    if (Outlived(shard)) return;
  const std::vector<PlanWindow> plans = async_->Plans().value();
  for (uint32_t slice = 0; slice < setup_->slices(); ++slice)
    node_->oracle()->CheckSlice(slice, plans[slice].version(), replica_->Gather(setup_->LayoutOf(slice)),
                                node_->name());
  std::vector<std::vector<float>> pending;
  for (uint32_t t = 0; t < memory_.size(); ++t) {
    const client::HostView kept = gradients_->KeptOf(t).pending;
    pending.emplace_back(kept.values.begin(), kept.values.end());
    pending.back().resize(memory_[t].size());
  }
  node_->oracle()->CheckConserved(member(), fed_, pending, node_->name());
}

}  // namespace gradwire::sim

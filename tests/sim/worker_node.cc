// The process of a worker and its training rounds, as Exchange has them; see worker_node.h.
#include "tests/sim/worker_node.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "common/job/norms.h"
#include "common/job/round_mode.h"
#include "tests/sim/chunks.h"
#include "tests/sim/worker_link.h"

namespace gradwire::sim {
namespace {

constexpr uint64_t kFrameOverheadBytes = 4096;  // of any frame, as of MemoryBound

}  // namespace

WorkerNode::WorkerNode(World* world, const Setup* setup, Oracle* oracle,
                       std::vector<std::unique_ptr<ServerNode>>* servers, uint32_t index)
    : world_(world),
      setup_(setup),
      oracle_(oracle),
      servers_(servers),
      name_(absl::StrCat("w", index)),
      paths_(setup->shards) {}

void WorkerNode::Start() {
  if (session_ != nullptr) return;
  session_ = std::make_shared<WorkerSession>(this, ++incarnations_);
  if (incarnations_ > 1) world_->Count(Event::kJoinedAnew);
  session_->Start();
}

void WorkerNode::Crash(TimeNs away) {
  if (session_ == nullptr) return;
  world_->Trace([&] { return absl::StrCat(name_, ": crashes, back in ", away / kMs, " ms"); });
  session_->End(/*leave=*/false);
  session_ = nullptr;
  world_->After(away, [this] { Start(); });
}

void WorkerNode::Leave(TimeNs away) {
  if (session_ == nullptr) return;
  world_->Trace([&] { return absl::StrCat(name_, ": leaves, back in ", away / kMs, " ms"); });
  session_->End(/*leave=*/true);
  session_ = nullptr;
  world_->After(away, [this] { Start(); });
}

void WorkerNode::Pause(TimeNs how_long) {
  world_->Trace([&] { return absl::StrCat(name_, ": paused for ", how_long / kMs, " ms"); });
  paused_until_ = std::max(paused_until_, world_->Now() + how_long);
}

void WorkerNode::SessionFailed() {
  session_ = nullptr;
  world_->After(world_->Between(10 * kMs, 300 * kMs), [this] { Start(); });
}

TimeNs WorkerNode::TakeThink() {
  if (next_think_) return *std::exchange(next_think_, std::nullopt);
  return world_->Between(2 * kMs, 60 * kMs);
}

WorkerSession::WorkerSession(WorkerNode* node, uint64_t incarnation)
    : node_(node),
      world_(node->world()),
      setup_(node->setup()),
      incarnation_(incarnation),
      memory_(setup_->InitialParameters()),
      gradient_(memory_),
      bad_(memory_.size()),
      sending_((setup_->staleness() + 1) * setup_->slices()) {
  std::vector<const Codec*> of_tensor(memory_.size());
  for (uint32_t slice = 0; slice < setup_->slices(); ++slice)
    for (const BucketPart& part : setup_->layout->parts(setup_->LayoutOf(slice).job_bucket))
      of_tensor[part.tensor] = setup_->codecs[slice].get();
  gradients_ = std::make_unique<client::GradientStore>(setup_->job.get(), of_tensor,
                                                       client::MakeHostMemory(setup_->backend.get()));
  replica_ = std::make_unique<client::Replica>(
      setup_->job.get(), setup_->layout.get(), client::MakeHostMemory(setup_->backend.get()),
      std::vector<std::span<float>>(memory_.begin(), memory_.end()), setup_->pull == PullMode::kUpdate);
}

uint64_t WorkerSession::member() const { return MakeMemberId(node_->name(), incarnation_); }

void WorkerSession::Guarded(std::function<void()> call) {
  if (over_) return;
  if (node_->paused_until() <= world_->Now()) return call();
  world_->At(node_->paused_until(), [self = shared_from_this(), call = std::move(call)] { self->Guarded(call); });
}

void WorkerSession::Later(TimeNs delay, std::function<void()> call) {
  world_->After(delay, [self = shared_from_this(), call = std::move(call)] { self->Guarded(call); });
}

void WorkerSession::End(bool leave) {
  over_ = true;
  for (uint32_t shard = 0; shard < links_.size(); ++shard) {
    Link& link = *links_[shard];
    if (leave && link.joined) {
      v1::LeaveRequest request;
      *request.mutable_identity() = RequestTo(shard).identity();
      ServerNode* const server = &node_->server(shard);
      Call(
          world_, &node_->path(shard), [server] { return TargetOf(server->process()); }, "gradwire.v1.Worker/Leave",
          request.SerializeAsString(), kSecond, [](const absl::StatusOr<std::string>&) {});
    }
    link.Drop(0, world_->Between(kUs, 20 * kMs));
  }
}

void WorkerSession::Fail(const absl::Status& status) {
  if (over_) return;
  world_->Trace([&] { return absl::StrCat(node_->name(), ": the session fails: ", status.ToString()); });
  if (training() && absl::IsResourceExhausted(status) && !node_->repeated)
    world_->Violate(absl::StrCat(node_->name(), " does what sessions do, and is refused: ", status.ToString()));
  if (!training()) world_->Count(Event::kStartInterrupted);
  End(/*leave=*/false);
  node_->SessionFailed();
}

void WorkerSession::BeginRound(bool again) {
  const uint64_t round = ledger_->next();
  ledger_->Open();
  in_step_ = true;
  for (uint32_t slice = 0; slice < setup_->slices(); ++slice) Of({round, slice}) = Sending();
  if (round > ledger_->round()) world_->Count(Event::kRoundAhead);
  world_->Trace([&] { return absl::StrCat(node_->name(), ": round ", round, " begins"); });
  if (SkipsNonFinite(*setup_->job) && !again) SaveUntaken();
  for (uint32_t t = 0; t < memory_.size(); ++t) {
    if (!again) {
      for (float& x : gradient_[t]) x = static_cast<float>(world_->Below(2001)) / 1000.0f - 1.0f;
      bad_[t] = world_->Chance(node_->bad_gradient);
      if (bad_[t]) {
        world_->Count(Event::kBadGradient);
        gradient_[t][world_->Below(gradient_[t].size())] = std::numeric_limits<float>::quiet_NaN();
      }
      const absl::Status taken = gradients_->Ingest(t, gradient_[t].data(), round);
      if (taken.ok() == bad_[t]) world_->Violate("a gradient with NaN was taken in, or one without was refused");
    }
    if (!bad_[t] && Carries(round)) gradients_->Select(t, round);
  }
  for (uint32_t slice = 0; slice < setup_->slices(); ++slice) SendSlice(slice);
}

std::vector<float> WorkerSession::ResidualOf(uint32_t slice) {
  std::vector<float> values;
  if (!setup_->codecs[slice]->uses_residual()) return values;
  const BucketLayout& layout = setup_->LayoutOf(slice);
  const std::vector<RunInput> inputs = gradients_->InputsOf(layout);
  for (size_t i = 0; i < inputs.size(); ++i)
    values.insert(values.end(), inputs[i].pending, inputs[i].pending + layout.runs[i].length);
  return values;
}

std::vector<float> WorkerSession::KeptOf(uint32_t tensor) const {
  const client::GradientStore::Kept kept = gradients_->KeptOf(tensor);
  std::vector<float> values;
  for (const client::HostView* view : {&kept.pending, &kept.second_moment}) {
    const std::span<const float> there = view->values;
    values.insert(values.end(), there.begin(), there.end());
    if (there.empty()) values.resize(values.size() + gradient_[tensor].size());
  }
  values.push_back(static_cast<float>(kept.steps));
  return values;
}

void WorkerSession::SaveUntaken() {
  untaken_.clear();
  for (uint32_t slice = 0; slice < setup_->slices(); ++slice) untaken_.push_back(ResidualOf(slice));
  kept_.clear();
  for (uint32_t t = 0; t < memory_.size(); ++t) kept_.push_back(KeptOf(t));
}

void WorkerSession::CheckUntaken() const {
  for (uint32_t t = 0; t < memory_.size(); ++t)
    if (KeptOf(t) != kept_[t])
      return world_->Violate(absl::StrCat(node_->name(), ": round ", ledger_->next() - 1,
                                          " was skipped, and what this worker keeps of tensor ", t, " has changed"));
}

bool WorkerSession::Carries(uint64_t round) const { return CarriesValues(*setup_->job, round); }

void WorkerSession::SendSlice(uint32_t slice) {
  const uint64_t round = ledger_->next() - 1;
  Sending& sending = Of({round, slice});
  bool abstain = false;
  for (const BucketPart& part : setup_->layout->parts(setup_->LayoutOf(slice).job_bucket))
    abstain = abstain || (Carries(round) && bad_[part.tensor]);
  sending.before = ResidualOf(slice);
  if (!abstain) {
    const absl::Status encoded = work_->Encode(slice, round, {&kLearningRate, 1}, &sending.bytes);
    if (!encoded.ok()) return world_->Violate(absl::StrCat("encoding failed: ", encoded.ToString()));
    sending.bytes.frame->chunks = Rechunk(sending.bytes.frame->chunks, setup_->chunk_bytes);
    node_->oracle()->Encoded(member(), {round, slice}, *sending.bytes.frame);
  } else if (SkipsNonFinite(*setup_->job)) {
    sending.bytes.nonfinite = true;
  } else {
    work_->Keep(slice);
  }
  sending.after = ResidualOf(slice);
  // One after the other, so that a crash or a break may come between any two.
  Later(world_->Between(0, 500 * kUs), [this, round, slice, abstain] {
    if (ledger_->IsOpen(round)) SendFrame({round, slice}, abstain);
  });
}

void WorkerSession::SendFrame(Entry entry, bool abstain) {
  const client::SliceBytes& bytes = Of(entry).bytes;
  if (abstain) {
    world_->Count(Event::kAbstained);
    ledger_->Abstains(entry);
  }
  if (bytes.nonfinite) {
    world_->Count(Event::kSkipAsked);
    node_->oracle()->SkipAsked(member(), entry);
  }
  const std::vector<Bytes> chunks =
      abstain ? work_->EncodeAbstain(entry.slice, entry.round, bytes.nonfinite) : bytes.frame->chunks;
  SendTo(setup_->LayoutOf(entry.slice).shard, chunks, ledger_->Wanted(entry), entry.round);
  client::RoundLedger::Actions actions;
  ledger_->Sent(entry, &actions);
  Run(actions);
}

void WorkerSession::SendAgain(Entry entry) {
  if (ledger_->SendAgain(entry)) SendFrame(entry, ledger_->abstained(entry));
}

void WorkerSession::OnAck(uint32_t shard, const v1::PushAck& ack) {
  if (!training()) {
    Link& link = *links_[shard];
    if (ack.outcome() != v1::PUSH_REFUSED) {
      ++link.uploaded;
    } else if (ack.code() == static_cast<int>(absl::StatusCode::kAlreadyExists) ||
               ack.code() == static_cast<int>(absl::StatusCode::kFailedPrecondition)) {
      link.refused = true;
    } else {
      return Fail(absl::InternalError(ack.message()));
    }
    return StartStep();
  }
  world_->Trace([&] {
    return absl::StrCat(node_->name(), ": round ", ack.round(), " shard ", shard, " bucket ", ack.bucket(), ": ",
                        v1::PushOutcome_Name(ack.outcome()), " ", ack.message());
  });
  if (ack.outcome() == v1::PUSH_DUPLICATE) world_->Count(Event::kDuplicateRecognized);
  if (ack.bucket() >= setup_->layout->bucket_count(shard)) return world_->Violate("an acknowledgement of no bucket");
  if (async_) {
    if (ack.outcome() == v1::PUSH_NOT_INCLUDED) world_->Count(Event::kNotIncluded);
    if (ack.outcome() == v1::PUSH_REFUSED) world_->Count(Event::kRefused);
    if (ack.made() > ack.round() + 1) world_->Count(Event::kAsyncBehind);
    async_->OnAck(shard, ack);
    return PollAsync();
  }
  client::RoundLedger::Actions actions;
  switch (ledger_->Acked({ack.round(), setup_->layout->slice_of(ack.bucket(), shard)}, ack.outcome(), ack.abstained(),
                         &actions)) {
    case client::RoundLedger::AckEffect::kNotIncluded:
      world_->Count(Event::kNotIncluded);
      break;
    case client::RoundLedger::AckEffect::kRefused:
      world_->Trace([&] { return absl::StrCat(node_->name(), ": refused: ", ack.message()); });
      world_->Count(Event::kRefused);
      break;
    case client::RoundLedger::AckEffect::kLost:
      return Fail(absl::FailedPreconditionError(ack.message()));
    case client::RoundLedger::AckEffect::kIgnored:
    case client::RoundLedger::AckEffect::kIncluded:
      break;
  }
  ledger_->Heard(ack.open_round());
  Run(actions);
}

uint64_t WorkerSession::VersionOf(const std::vector<wire::Chunk>& answer) const {
  return setup_->async() ? answer[0].header.round : version_;
}

void WorkerSession::OnAnswer(uint32_t shard, v1::PullKind kind, uint32_t bucket, uint64_t version,
                             const absl::Status& status, std::vector<wire::Chunk> chunks) {
  if (!training()) {
    Link& link = *links_[shard];
    if (!status.ok()) return Fail(status);
    if (version != version_ || bucket >= link.answers.size() || !link.answers[bucket].empty()) return;
    link.answers[bucket] = std::move(chunks);
    link.trained = link.trained || VersionOf(link.answers[bucket]) > version_;
    ++link.answered;
    return StartStep();
  }
  if (async_) return OnAsyncAnswer(shard, {kind, bucket, version, std::move(chunks), status});
  world_->Trace([&] {
    return absl::StrCat(node_->name(), ": version ", version, " shard ", shard, " bucket ", bucket, ": ",
                        v1::PullKind_Name(kind), " ", status.ToString());
  });
  if (catching_) return OnCaught(shard, kind, bucket, version, status, std::move(chunks));
  if (version <= ledger_->round()) return;
  const Entry entry{version - 1, setup_->layout->slice_of(bucket, shard)};
  client::RoundLedger::Actions actions;
  if (absl::IsOutOfRange(status)) {
    if (ledger_->Gone(entry, kind, &actions) != client::RoundLedger::AnswerEffect::kTaken) return;
    world_->Count(Event::kAnswerGone);
    (kind == v1::PULL_UPDATE ? Of(entry).bytes.update_gone : Of(entry).bytes.parameters_gone) = true;
    return Run(actions);
  }
  if (!status.ok()) return Fail(status);
  switch (ledger_->Answered(entry, kind, &actions)) {
    case client::RoundLedger::AnswerEffect::kTaken:
      if (!Outlived(shard))
        node_->oracle()->Seen(entry, kind == v1::PULL_UPDATE ? BytesOf(chunks) : std::vector<Bytes>());
      (kind == v1::PULL_UPDATE ? Of(entry).bytes.update_chunks : Of(entry).bytes.parameter_chunks) = std::move(chunks);
      return Run(actions);
    case client::RoundLedger::AnswerEffect::kRepeated:
      return;
    case client::RoundLedger::AnswerEffect::kUnexpected:
      if (ledger_->Behind()) return;  // of an attempt to catch up that was given up
      return world_->Violate(
          absl::StrCat(node_->name(), " was given version ", version, " in round ", ledger_->next() - 1));
  }
}

void WorkerSession::Run(const client::RoundLedger::Actions& actions) {
  for (Entry entry : actions.abstain)
    Later(0, [this, entry] {
      if (!ledger_->SendAgain(entry)) return;
      SendFrame(entry, /*abstain=*/true);
    });
  for (Entry entry : actions.ask) {
    world_->Count(Event::kFateAsked);
    RequestPull(setup_->LayoutOf(entry.slice).shard, v1::PULL_UPDATE, entry.round + 1,
                setup_->LayoutOf(entry.slice).bucket, 1);
  }
  for (Entry entry : actions.decode) {
    const absl::Status status = work_->Decode(entry.slice, entry.round, &Of(entry).bytes);
    if (!status.ok()) return world_->Violate(absl::StrCat(node_->name(), ": ", status.ToString()));
    decoded_.push_back(entry);
  }
  GoOn();
}

bool WorkerSession::SettleNext() {
  const auto next =
      std::find_if(decoded_.begin(), decoded_.end(), [&](Entry entry) { return ledger_->MayApply(entry); });
  if (next == decoded_.end()) return false;
  const Entry entry = *next;
  decoded_.erase(next);
  Settle(entry);
  return true;
}

void WorkerSession::Settle(Entry entry) {
  client::SliceBytes& bytes = Of(entry).bytes;
  const uint32_t shard = setup_->LayoutOf(entry.slice).shard;
  const bool included = ledger_->included(entry);
  const std::vector<float> held = ResidualOf(entry.slice);
  const absl::Status status = work_->Apply(entry.slice, entry.round, included, &bytes);
  if (!status.ok()) return world_->Violate(absl::StrCat(node_->name(), ": ", status.ToString()));
  node_->oracle()->Settled(member(), entry, included, Outlived(shard));
  if (bytes.nonfinite && !bytes.skipped) world_->Count(Event::kAskedTooLate);
  CheckResidual(entry, included, held);
  skipped_ = bytes.skipped;
  if (setup_->job->two_phase() && Carries(entry.round)) world_->Count(Event::kStepOfTwoRounds);
  if (entry.round + 1 < ledger_->next() && bytes.frame && !included) world_->Count(Event::kReturnedBesideLater);
  bytes = client::SliceBytes();
  ledger_->Settled(entry);
  CheckShard(shard);
}

// Where all slices of the shard have the same version.
void WorkerSession::CheckShard(uint32_t shard) {
  const uint64_t version = work_->plans(setup_->layout->slice_of(0, shard)).version();
  for (const uint32_t slice : setup_->layout->slices_of(shard))
    if (work_->plans(slice).version() != version) return;
  if (!Outlived(shard)) node_->oracle()->CheckDigest(shard, version, replica_->ShardDigest(shard), node_->name());
}

// To the last bit: what was not sent, or not merged, is where it was before; what nobody could decode, too.
void WorkerSession::Check() const {
  if (async_) return;
  uint64_t held = 0;
  uint64_t limit = 0;
  for (uint32_t slice = 0; slice < setup_->slices(); ++slice) {
    for (uint64_t age = 0; age <= setup_->staleness(); ++age) {
      const client::SliceBytes& bytes = sending_[age * setup_->slices() + slice].bytes;
      if (bytes.frame) held += TotalSize(bytes.frame->chunks);
      held += TotalSize(BytesOf(bytes.update_chunks)) + TotalSize(BytesOf(bytes.parameter_chunks));
      limit += 3 * (setup_->LayoutOf(slice).elements * 3 * sizeof(float) + kFrameOverheadBytes);
    }
  }
  if (catching_)
    for (const std::vector<wire::Chunk>& chunks : catching_->chunks) held += TotalSize(BytesOf(chunks));
  if (held > limit)
    world_->Violate(absl::StrCat(node_->name(), " holds ", held, " bytes of frames and answers, the bound is ", limit));
}

void WorkerSession::CheckResidual(Entry entry, bool included, const std::vector<float>& held) {
  const Sending& sending = Of(entry);
  if (!Carries(entry.round) || sending.before.empty()) return;
  std::vector<float> expected = included ? sending.after : sending.before;
  const std::vector<uint32_t>& deferred = sending.bytes.update.deferred;
  // A frame that came too late is given back none the less where the worker was not told.
  const bool told = !sending.bytes.update_gone || included;
  const bool skipped =
      Outlived(setup_->LayoutOf(entry.slice).shard) ? sending.bytes.skipped : told && node_->oracle()->Skipped(entry);
  if (skipped || (sending.bytes.nonfinite && sending.bytes.update_gone)) {
    expected = untaken_[entry.slice];
  } else if (setup_->returns_by_addition()) {
    // Beside later frames, or only to within a rounding: what the codec says is added to what is there, and no more.
    expected = held;
    std::vector<float*> runs;
    size_t position = 0;
    for (const gradwire::Run& run : setup_->LayoutOf(entry.slice).runs) {
      runs.push_back(expected.data() + position);
      position += run.length;
    }
    if (sending.bytes.frame && (!included || !deferred.empty())) {
      const absl::Status returned =
          setup_->codecs[entry.slice]->Return(*sending.bytes.frame, included ? &deferred : nullptr, runs);
      if (!returned.ok()) return world_->Violate(returned.ToString());
    }
  } else if (included) {
    for (uint32_t position : deferred) expected[position] = sending.before[position];
  }
  const std::vector<float> residual = ResidualOf(entry.slice);
  if (std::memcmp(residual.data(), expected.data(), residual.size() * sizeof(float)) == 0) return;
  world_->Violate(absl::StrCat(node_->name(), ": after round ", entry.round, " the residual of slice ", entry.slice,
                               " is not what was left of the gradient"));
}

bool WorkerSession::Outlived(uint32_t shard) const { return node_->oracle()->Outlived(shard, links_[shard]->epoch); }

// As Exchange::MayGoOn.
bool WorkerSession::MayGoOn() const {
  if (ledger_->Behind() || !Carries(ledger_->next() - 1)) return ledger_->AllSettled();
  return ledger_->version() + setup_->staleness() >= ledger_->next() && ledger_->AllSent(ledger_->next() - 1);
}

void WorkerSession::GoOn() {
  if (!in_step_ || over_) return;
  while (SettleNext() && !world_->violated()) {
  }
  if (world_->violated() || !MayGoOn()) return;
  in_step_ = false;
  while (ledger_->version() > ledger_->round()) ledger_->Close();
  if (ledger_->Behind()) return CatchUp();
  if (!Carries(ledger_->next() - 1)) return BeginRound(/*again=*/true);
  if (skipped_ && ledger_->next() - 1 > 0) CheckUntaken();
  FinishStep();
}

void WorkerSession::FinishStep() {
  gradients_->EndRound();
  Later(node_->TakeThink(), [this] { BeginRound(/*again=*/false); });
}

}  // namespace gradwire::sim

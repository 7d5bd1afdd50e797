// Rounds of jobs whose shards agree before they write, on the norms of whole tensors or whether a gradient was not
// finite: what has closed is held until all shards have told what they have; see job_shard.h and proto/NORMS.md.
//
//   bucket closes -> finished, its squares (the thread that closes it) ... all buckets of the round
//     -> exchange, phase by phase -> norms into the update frames -> journal, optimizer, version + 1 (the norm thread: PumpNorms)
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/failpoint.h"
#include "common/base/out_of_memory.h"
#include "common/base/start_thread.h"
#include "common/base/status_macros.h"
#include "common/job/norms.h"
#include "server/job/job_shard.h"
#include "server/job/norm_state.h"

namespace gradwire {
namespace {

// The largest message between shards; transports take 8 MiB.
constexpr uint64_t kMaxExchangeBytes = 7u << 20;

size_t MostNormsOfPhase(const Job& job) {
  size_t most = 0;
  for (const std::vector<Norm>& phase : NormPhases(job)) most = std::max(most, phase.size());
  return most;
}

}  // namespace

absl::Status JobShard::PrepareNorms() {
  const std::string& name = job_.spec().name();
  if (NormPhases(job_).empty()) return absl::OkStatus();
  norms_ = std::make_unique<NormState>(&job_, &layout_, shard_index_, environment_.tellers,
                                       [this](uint64_t round, size_t phase) { return WrittenSquares(round, phase); });
  const uint64_t message = norms_->sums.MaxMessageBytes(MostNormsOfPhase(job_));
  if (layout_.shard_count() > 1 && message > kMaxExchangeBytes) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("job '%s': norms of %d bytes would pass between shards at once, at most %d may: raise "
                        "run_elements or use more shards",
                        name, message, kMaxExchangeBytes));
  }
  GW_RETURN_IF_ERROR(norms_->exchange.Start());
  if (environment_.tellers == nullptr) return absl::OkStatus();
  GW_ASSIGN_OR_RETURN(norms_->thread,
                      StartThread(absl::StrFormat("job '%s': norms", name), [this] { NormLoop(); }));
  return absl::OkStatus();
}

absl::Status JobShard::CheckAddresses(const std::vector<std::string>& addresses) const {
  if (norms_ == nullptr || layout_.shard_count() == 1) return absl::OkStatus();
  return norms_->exchange.CheckAddresses(addresses);
}

void JobShard::SetAddresses(MemberId member, const std::vector<std::string>& addresses) {
  if (norms_ == nullptr || layout_.shard_count() == 1) return;
  norms_->exchange.SetAddresses(member, addresses);
  bool gone = false;  // since it joined
  {
    absl::MutexLock lock(&mu_);
    gone = machine_.membership().Get(member) == nullptr;
  }
  if (gone) norms_->exchange.ForgetAddresses(member);
}

void JobShard::ForgetAddresses(MemberId member) {
  if (norms_ != nullptr) norms_->exchange.ForgetAddresses(member);
}

absl::StatusOr<v1::ExchangeReply> JobShard::ExchangeNorms(const v1::ExchangeRequest& request) {
  if (norms_ != nullptr) return norms_->exchange.Take(request);
  return absl::FailedPreconditionError(
      absl::StrFormat("job '%s' has nothing that its shards agree on", job_.spec().name()));
}

void JobShard::StopNorms() {
  if (norms_ == nullptr) return;
  {
    absl::MutexLock lock(&norms_->mu);
    if (norms_->stopped) return;
    norms_->stopped = true;
  }
  norms_->exchange.Stop();
  if (norms_->thread.joinable()) norms_->thread.join();
}

void JobShard::RestoreNorms(uint64_t round) {
  if (norms_ == nullptr) return;
  round = std::max<uint64_t>(round, 1);
  norms_->exchange.SetRound(round);
  std::vector<uint64_t> versions;
  for (const auto& bucket : buckets_) {
    absl::MutexLock lock(&bucket->mu);
    versions.push_back(bucket->version);
  }
  absl::MutexLock lock(&norms_->mu);
  norms_->round = round;
  norms_->versions = std::move(versions);
  norms_->work = true;
}

void JobShard::HoldClosed(const RoundActions::Close& close) {
  {
    absl::MutexLock lock(&norms_->mu);
    if (close.round != norms_->round) {  // the norm thread comes to it
      norms_->later[close.round].push_back(close);
      return;
    }
  }
  Hold(close);
}

void JobShard::Hold(const RoundActions::Close& close) {
  BucketState& bucket = *buckets_[close.bucket];
  HeldBucket held;
  GW_FAILPOINT("round.before_close");
  absl::Status status = CatchBadAlloc("merging", [&]() -> absl::Status {
    held.close = close;
    GW_RETURN_IF_ERROR(FinishRound(bucket, close, &held.frame));
    if (sink_ != nullptr) held.who = WhoTookPart(close);
    absl::MutexLock lock(&bucket.mu);
    held.nonfinite = bucket.Find(close.round)->nonfinite;
    if (held.frame.decoded != nullptr) {
      held.update = std::make_shared<Update>(*held.frame.decoded);
    } else {
      const RoundPlan& plan = *bucket.plans.Find(PlanVersionOf(close));
      GW_ASSIGN_OR_RETURN(Update update, DecodeUpdate(held.frame.chunks, job_, *bucket.layout, plan));
      held.update = std::make_shared<Update>(std::move(update));
    }
    held.frame.decoded = held.update;
    GW_ASSIGN_OR_RETURN(held.squares, bucket.store->Squares(*held.update, 0));
    return absl::OkStatus();
  });
  if (!status.ok()) return FailBuckets(close.round, status);
  absl::MutexLock lock(&norms_->mu);
  norms_->held[close.bucket] = std::move(held);
  norms_->work = true;
}

void JobShard::FailBuckets(uint64_t round, const absl::Status& why) {
  spdlog::error("job {} round {}: {}", job_.spec().name(), round, why.ToString());
  for (const auto& bucket : buckets_) {
    std::vector<Delivery> ready;
    {
      absl::MutexLock lock(&bucket->mu);
      if (bucket->failure.ok()) {
        bucket->failure = absl::Status(
            why.code(),
            absl::StrFormat("job '%s' stopped in round %d: %s", job_.spec().name(), round, std::string(why.message())));
      }
      ready = TakeReady(*bucket);
    }
    Deliver(std::move(ready));
  }
}

void JobShard::NormLoop() {
  NormState& norms = *norms_;
  const auto ready = [&norms]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(norms.mu) { return norms.stopped || norms.work; };
  for (;;) {
    {
      absl::MutexLock lock(&norms.mu);
      norms.mu.Await(absl::Condition(&ready));
      if (norms.stopped) return;
    }
    PumpNorms();
  }
}

bool JobShard::NormsHaveWork() const {
  if (norms_ == nullptr) return false;
  absl::MutexLock lock(&norms_->mu);
  return norms_->work && !norms_->stopped;
}

NormExchange* JobShard::norm_exchange() { return norms_ == nullptr ? nullptr : &norms_->exchange; }

void JobShard::PumpNorms() {
  {
    absl::MutexLock lock(&norms_->mu);
    norms_->work = false;
  }
  while (TakeHeld()) {
    Agreeing& agreeing = *norms_->agreeing;
    bool closed = false;
    const absl::Status status =
        CatchBadAlloc("the norms of a round", [&]() -> absl::Status {
          GW_ASSIGN_OR_RETURN(closed, Agree(&agreeing));
          return closed ? CloseHeld(&agreeing) : absl::OkStatus();
        });
    if (status.ok() && !closed) return;  // until other shards have told more
    const uint64_t round = agreeing.round;
    if (!status.ok()) FailBuckets(round, status);
    norms_->agreeing.reset();
    norms_->exchange.SetRound(round + 1);
    std::vector<RoundActions::Close> next;
    {
      absl::MutexLock lock(&norms_->mu);
      norms_->round = round + 1;
      if (auto node = norms_->later.extract(round + 1)) next = std::move(node.mapped());
    }
    for (const RoundActions::Close& close : next) Hold(close);
  }
}

bool JobShard::TakeHeld() {
  NormState& norms = *norms_;
  absl::MutexLock lock(&norms.mu);
  if (norms.stopped) return false;
  if (norms.agreeing) return true;
  for (size_t b = 0; b < norms.held.size(); ++b) {
    if (!norms.held[b] && norms.versions[b] <= norms.round) return false;
  }
  norms.agreeing.emplace().round = norms.round;
  for (std::optional<HeldBucket>& bucket : norms.held) {
    if (bucket) norms.agreeing->held.push_back(*std::move(bucket));
    bucket.reset();
  }
  return true;
}

absl::StatusOr<bool> JobShard::Agree(Agreeing* agreeing) {
  const size_t phases = NormPhases(job_).size();
  while (!agreeing->skipped && agreeing->phase < phases) {
    if (!agreeing->offered) {
      GW_ASSIGN_OR_RETURN(ShardSquares own, SquaresOf(agreeing));
      GW_FAILPOINT("norms.before_exchange");
      norms_->exchange.Offer(agreeing->round, agreeing->phase, std::move(own));
      agreeing->offered = true;
    }
    const std::optional<NormExchange::Agreed> agreed = norms_->exchange.TryAgree(agreeing->round, agreeing->phase);
    if (!agreed) return false;
    GW_FAILPOINT("norms.after_exchange");
    agreeing->skipped = agreed->skipped;
    if (!agreed->skipped) SetNorms(agreed->sums, agreeing);
    agreeing->offered = false;
    ++agreeing->phase;
  }
  return true;
}

absl::Status JobShard::CloseHeld(Agreeing* agreeing) {
  if (agreeing->skipped) {
    spdlog::info("job {} round {}: skipped, because a gradient in it is not finite", job_.spec().name(),
                 agreeing->round);
    for (HeldBucket& bucket : agreeing->held) GW_RETURN_IF_ERROR(Skip(&bucket));
  }
  for (HeldBucket& bucket : agreeing->held) {
    GW_FAILPOINT("norms.before_write");
    if (!agreeing->skipped) AppendNorms(job_, *bucket.update, &bucket.frame.chunks);
    PublishClosed(bucket.close, bucket.frame, std::move(bucket.who));
  }
  return absl::OkStatus();
}

absl::StatusOr<ShardSquares> JobShard::SquaresOf(Agreeing* agreeing) {
  const size_t phase = agreeing->phase;
  const size_t count = NormPhases(job_)[phase].size();
  ShardSquares own;
  const size_t runs = norms_->sums.runs(shard_index_);
  own.runs.resize(count * runs);
  own.totals = TotalsOf(agreeing->round, phase);
  if (phase == 0) own.fate = FateOf(agreeing->round, agreeing->held);
  for (HeldBucket& bucket : agreeing->held) {
    BucketState& state = *buckets_[bucket.close.bucket];
    if (phase > 0) {
      absl::MutexLock lock(&state.mu);
      GW_ASSIGN_OR_RETURN(bucket.squares, state.store->Squares(*bucket.update, phase));
    }
    const size_t here = state.layout->runs.size();
    for (size_t k = 0; k < count; ++k) {
      std::copy_n(bucket.squares.data() + k * here, here,
                  own.runs.data() + k * runs + norms_->sums.first_run(bucket.close.bucket, shard_index_));
    }
  }
  return own;
}

void JobShard::SetNorms(const std::vector<double>& sums, Agreeing* agreeing) {
  const std::vector<std::vector<Norm>> phases = NormPhases(job_);
  const size_t per_tensor = NormsOf(job_).size();
  const size_t count = phases[agreeing->phase].size();
  size_t done = 0;  // norms of earlier phases
  for (size_t p = 0; p < agreeing->phase; ++p) done += phases[p].size();
  std::optional<double> mean_square;
  if (agreeing->phase == 0 && ClipsNorm(job_)) {
    mean_square = 0;
    for (const double sum : sums) *mean_square += sum;
  }
  for (HeldBucket& bucket : agreeing->held) {
    if (mean_square) bucket.update->mean_square = mean_square;
    const std::vector<uint32_t> tensors = TensorsOf(*buckets_[bucket.close.bucket]->layout);
    bucket.update->norms.resize(per_tensor * tensors.size());
    for (size_t t = 0; t < tensors.size(); ++t) {
      std::copy_n(sums.data() + tensors[t] * count, count, bucket.update->norms.data() + t * per_tensor + done);
    }
  }
}

absl::Status JobShard::Skip(HeldBucket* held) {
  BucketState& bucket = *buckets_[held->close.bucket];
  absl::MutexLock lock(&bucket.mu);
  const RoundPlan& plan = *bucket.plans.Find(PlanVersionOf(held->close));
  FrameIdentity id = IdentityOf(bucket, *bucket.Find(held->close.round));
  ++id.nonfinite_rounds;
  held->frame = SkippedUpdate(id, *bucket.layout, plan);
  // What the update codec had dropped stays as it was.
  return bucket.store->Compress(plan, &held->frame);
}

const RetainedUpdate* JobShard::UpdateOf(const BucketState& bucket, uint64_t round) const {
  const uint64_t age = bucket.version - 1 - round;
  if (bucket.version <= round || age >= bucket.updates.size()) return nullptr;
  return &bucket.updates[bucket.updates.size() - 1 - age];
}

v1::RoundFate JobShard::FateOf(uint64_t round, const std::vector<HeldBucket>& held) {
  if (!SkipsNonFinite(job_)) return v1::FATE_UNSPECIFIED;
  for (const auto& bucket : buckets_) {
    absl::MutexLock lock(&bucket->mu);
    const RetainedUpdate* const update = UpdateOf(*bucket, round);
    if (update != nullptr) return update->skipped ? v1::FATE_SKIPPED : v1::FATE_APPLIED;
  }
  const bool nonfinite = std::any_of(held.begin(), held.end(), [](const HeldBucket& h) { return h.nonfinite; });
  return nonfinite ? v1::FATE_NONFINITE : v1::FATE_UNSPECIFIED;
}

std::map<uint32_t, std::vector<double>> JobShard::TotalsOf(uint64_t round, size_t phase) {
  const std::vector<std::vector<Norm>> phases = NormPhases(job_);
  const size_t per_tensor = NormsOf(job_).size();
  size_t first = 0;
  for (size_t p = 0; p < phase; ++p) first += phases[p].size();
  std::map<uint32_t, std::vector<double>> totals;
  for (const auto& bucket : buckets_) {
    SharedChunks chunks;
    {
      absl::MutexLock lock(&bucket->mu);
      const RetainedUpdate* const update = UpdateOf(*bucket, round);
      if (update == nullptr) continue;
      chunks = update->chunks;
    }
    Update update;
    if (!DecodeNorms(*chunks, job_, *bucket->layout, &update).ok()) continue;
    const std::vector<uint32_t> tensors = TensorsOf(*bucket->layout);
    for (size_t t = 0; update.norms.size() == per_tensor * tensors.size() && t < tensors.size(); ++t) {
      const double* const begin = update.norms.data() + t * per_tensor + first;
      totals[tensors[t]].assign(begin, begin + phases[phase].size());
    }
  }
  return totals;
}

std::optional<ShardSquares> JobShard::WrittenSquares(uint64_t round, size_t phase) {
  ShardSquares squares;
  squares.totals = TotalsOf(round, phase);
  squares.fate = FateOf(round, {});
  squares.runs.resize(NormPhases(job_)[phase].size() * norms_->sums.runs(shard_index_));
  if (squares.fate == v1::FATE_SKIPPED) return squares;  // without norms
  for (const auto& bucket : buckets_) {
    for (const uint32_t tensor : TensorsOf(*bucket->layout)) {
      if (!squares.totals.contains(tensor)) return std::nullopt;
    }
  }
  return squares;
}

}  // namespace gradwire

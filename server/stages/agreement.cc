// See agreement.h.
#include "server/stages/agreement.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/failpoint.h"
#include "common/base/out_of_memory.h"
#include "common/base/start_thread.h"
#include "common/base/status_macros.h"
#include "common/job/norms.h"
#include "server/flow/open_rounds.h"

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

bool Agreement::IsNeededBy(const Job& job) { return !NormPhases(job).empty(); }

Agreement::Agreement(JobParts* parts, StopJob stop, Stage* next)
    : parts_(*parts),
      stop_(std::move(stop)),
      next_(*next),
      sums_(&parts_.layout, parts_.job.tensors().size()),
      held_(parts_.layout.bucket_count(parts_.shard_index)),
      versions_(parts_.layout.bucket_count(parts_.shard_index)),
      exchange_(
          &parts_.job, &parts_.layout, parts_.shard_index, parts_.environment.tellers,
          [this](uint64_t round, size_t phase) { return WrittenSquares(round, phase); },
          [this] {
            absl::MutexLock lock(&mu_);
            work_ = true;
          }) {}

absl::Status Agreement::Start(Turn* turn) {
  turn_ = turn;
  const std::string& name = parts_.job.spec().name();
  const uint64_t message = sums_.MaxMessageBytes(MostNormsOfPhase(parts_.job));
  if (parts_.layout.shard_count() > 1 && message > kMaxExchangeBytes) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("job '%s': norms of %d bytes would pass between shards at once, at most %d may: raise "
                        "run_elements or use more shards",
                        name, message, kMaxExchangeBytes));
  }
  GW_RETURN_IF_ERROR(exchange_.Start());
  if (parts_.environment.tellers == nullptr) return absl::OkStatus();
  GW_ASSIGN_OR_RETURN(thread_, StartThread(absl::StrFormat("job '%s': norms", name), [this] { Run(); }));
  return absl::OkStatus();
}

void Agreement::Stop() {
  {
    absl::MutexLock lock(&mu_);
    if (stopped_) return;
    stopped_ = true;
  }
  exchange_.Stop();
  if (thread_.joinable()) thread_.join();
}

void Agreement::Restore(uint64_t round) {
  round = std::max<uint64_t>(round, 1);
  exchange_.SetRound(round);
  std::vector<uint64_t> versions;
  for (const auto& bucket : parts_.buckets) {
    absl::MutexLock lock(&bucket->mu);
    versions.push_back(bucket->version);
  }
  {
    absl::MutexLock lock(&mu_);
    round_ = round;
    versions_ = std::move(versions);
    work_ = true;
  }
  turn_->Begin(round);
}

void Agreement::Pass(ClosedBucket&& closed) {
  const uint64_t round = closed.close.round;
  if (round == 0) return next_.Pass(std::move(closed));
  const uint32_t bucket = closed.close.bucket;
  absl::StatusOr<HeldBucket> held =
      CatchBadAlloc("merging", [&]() -> absl::StatusOr<HeldBucket> { return Hold(std::move(closed)); });
  if (!held.ok()) return stop_(round, held.status());
  absl::MutexLock lock(&mu_);
  held_[bucket] = *std::move(held);
  work_ = true;
}

absl::StatusOr<HeldBucket> Agreement::Hold(ClosedBucket&& closed) const {
  GW_RETURN_IF_ERROR(closed.status);
  BucketState& bucket = *closed.bucket;
  HeldBucket held;
  absl::MutexLock lock(&bucket.mu);
  if (closed.update.decoded != nullptr) {
    held.update = std::make_shared<Update>(*closed.update.decoded);
  } else {
    const RoundPlan& plan = *bucket.plans.Find(closed.plan_version);
    GW_ASSIGN_OR_RETURN(Update update, DecodeUpdate(closed.update.chunks, parts_.job, *bucket.layout, plan));
    held.update = std::make_shared<Update>(std::move(update));
  }
  closed.update.decoded = held.update;
  GW_ASSIGN_OR_RETURN(held.squares, bucket.store->Squares(*held.update, 0));
  held.closed = std::move(closed);
  return held;
}

void Agreement::Run() {
  const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopped_ || work_; };
  for (;;) {
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(&ready));
      if (stopped_) return;
    }
    Pump();
  }
}

bool Agreement::HasWork() const {
  absl::MutexLock lock(&mu_);
  return work_ && !stopped_;
}

void Agreement::Pump() {
  {
    absl::MutexLock lock(&mu_);
    work_ = false;
  }
  while (TakeHeld()) {
    AgreeingRound& agreeing = *agreeing_;
    bool agreed = false;
    const absl::Status status = CatchBadAlloc("the norms of a round", [&]() -> absl::Status {
      GW_ASSIGN_OR_RETURN(agreed, Agree(&agreeing));
      return agreed ? PassOn(&agreeing) : absl::OkStatus();
    });
    if (status.ok() && !agreed) return;  // until other shards have told more
    const uint64_t round = agreeing.round;
    if (!status.ok()) stop_(round, status);
    agreeing_.reset();
    exchange_.SetRound(round + 1);
    {
      absl::MutexLock lock(&mu_);
      round_ = round + 1;
    }
    turn_->Begin(round + 1);
  }
}

bool Agreement::TakeHeld() {
  absl::MutexLock lock(&mu_);
  if (stopped_) return false;
  if (agreeing_) return true;
  for (size_t b = 0; b < held_.size(); ++b) {
    if (!held_[b] && versions_[b] <= round_) return false;
  }
  agreeing_.emplace().round = round_;
  for (std::optional<HeldBucket>& bucket : held_) {
    std::optional<HeldBucket> taken = std::exchange(bucket, std::nullopt);
    if (taken) agreeing_->held.push_back(*std::move(taken));
  }
  return true;
}

absl::StatusOr<bool> Agreement::Agree(AgreeingRound* round) {
  const size_t phases = NormPhases(parts_.job).size();
  while (!round->skipped && round->phase < phases) {
    if (!round->offered) {
      GW_ASSIGN_OR_RETURN(ShardSquares own, SquaresOf(round));
      GW_FAILPOINT("norms.before_exchange");
      exchange_.Offer(round->round, round->phase, std::move(own));
      round->offered = true;
    }
    const std::optional<NormExchange::Agreed> agreed = exchange_.TryAgree(round->round, round->phase);
    if (!agreed) return false;
    GW_FAILPOINT("norms.after_exchange");
    round->skipped = agreed->skipped;
    if (!agreed->skipped) SetNorms(agreed->sums, round);
    round->offered = false;
    ++round->phase;
  }
  return true;
}

absl::Status Agreement::PassOn(AgreeingRound* round) {
  if (round->skipped) {
    spdlog::info("job {} round {}: skipped, because a gradient in it is not finite", parts_.job.spec().name(),
                 round->round);
    for (HeldBucket& bucket : round->held) GW_RETURN_IF_ERROR(Skip(&bucket));
  }
  for (HeldBucket& bucket : round->held) {
    GW_FAILPOINT("norms.before_write");
    if (!round->skipped) AppendNorms(parts_.job, *bucket.update, &bucket.closed.update.chunks);
    next_.Pass(std::move(bucket.closed));
  }
  return absl::OkStatus();
}

absl::StatusOr<ShardSquares> Agreement::SquaresOf(AgreeingRound* round) {
  const size_t phase = round->phase;
  const size_t count = NormPhases(parts_.job)[phase].size();
  ShardSquares own;
  const size_t runs = sums_.runs(parts_.shard_index);
  own.runs.resize(count * runs);
  own.totals = TotalsOf(round->round, phase);
  if (phase == 0) own.fate = FateOf(round->round, round->held);
  for (HeldBucket& bucket : round->held) {
    BucketState& state = *parts_.buckets[bucket.closed.close.bucket];
    if (phase > 0) {
      absl::MutexLock lock(&state.mu);
      GW_ASSIGN_OR_RETURN(bucket.squares, state.store->Squares(*bucket.update, phase));
    }
    const size_t here = state.layout->runs.size();
    for (size_t k = 0; k < count; ++k) {
      std::copy_n(bucket.squares.data() + k * here, here,
                  own.runs.data() + k * runs + sums_.first_run(bucket.closed.close.bucket, parts_.shard_index));
    }
  }
  return own;
}

void Agreement::SetNorms(const std::vector<double>& sums, AgreeingRound* round) {
  const std::vector<std::vector<Norm>> phases = NormPhases(parts_.job);
  const size_t per_tensor = NormsOf(parts_.job).size();
  const size_t count = phases[round->phase].size();
  size_t done = 0;  // norms of earlier phases
  for (size_t p = 0; p < round->phase; ++p) done += phases[p].size();
  std::optional<double> mean_square;
  if (round->phase == 0 && ClipsNorm(parts_.job)) {
    mean_square = 0;
    for (const double sum : sums) *mean_square += sum;
  }
  for (HeldBucket& bucket : round->held) {
    if (mean_square) bucket.update->mean_square = mean_square;
    const std::vector<uint32_t> tensors = TensorsOf(*parts_.buckets[bucket.closed.close.bucket]->layout);
    bucket.update->norms.resize(per_tensor * tensors.size());
    for (size_t t = 0; t < tensors.size(); ++t) {
      std::copy_n(sums.data() + tensors[t] * count, count, bucket.update->norms.data() + t * per_tensor + done);
    }
  }
}

absl::Status Agreement::Skip(HeldBucket* held) {
  ClosedBucket& closed = held->closed;
  BucketState& bucket = *closed.bucket;
  absl::MutexLock lock(&bucket.mu);
  const RoundPlan& plan = *bucket.plans.Find(closed.plan_version);
  FrameIdentity id = IdentityOf(bucket, *bucket.Find(closed.close.round));
  ++id.nonfinite_rounds;
  closed.update = SkippedUpdate(id, *bucket.layout, plan);
  // What the update codec had dropped stays as it was.
  return bucket.store->Compress(plan, &closed.update);
}

v1::RoundFate Agreement::FateOf(uint64_t round, const std::vector<HeldBucket>& held) {
  if (!SkipsNonFinite(parts_.job)) return v1::FATE_UNSPECIFIED;
  for (const auto& bucket : parts_.buckets) {
    absl::MutexLock lock(&bucket->mu);
    const RetainedUpdate* const update = bucket->UpdateOf(round);
    if (update != nullptr) return update->skipped ? v1::FATE_SKIPPED : v1::FATE_APPLIED;
  }
  const bool nonfinite = std::any_of(held.begin(), held.end(), [](const HeldBucket& h) { return h.closed.nonfinite; });
  return nonfinite ? v1::FATE_NONFINITE : v1::FATE_UNSPECIFIED;
}

std::map<uint32_t, std::vector<double>> Agreement::TotalsOf(uint64_t round, size_t phase) {
  const std::vector<std::vector<Norm>> phases = NormPhases(parts_.job);
  const size_t per_tensor = NormsOf(parts_.job).size();
  size_t first = 0;
  for (size_t p = 0; p < phase; ++p) first += phases[p].size();
  std::map<uint32_t, std::vector<double>> totals;
  for (const auto& bucket : parts_.buckets) {
    SharedFrame frame;
    {
      absl::MutexLock lock(&bucket->mu);
      const RetainedUpdate* const update = bucket->UpdateOf(round);
      if (update == nullptr) continue;
      frame = update->frame;
    }
    Update update;
    if (!DecodeNorms(frame->pieces(), parts_.job, *bucket->layout, &update).ok()) continue;
    const std::vector<uint32_t> tensors = TensorsOf(*bucket->layout);
    for (size_t t = 0; update.norms.size() == per_tensor * tensors.size() && t < tensors.size(); ++t) {
      const double* const begin = update.norms.data() + t * per_tensor + first;
      totals[tensors[t]].assign(begin, begin + phases[phase].size());
    }
  }
  return totals;
}

std::optional<ShardSquares> Agreement::WrittenSquares(uint64_t round, size_t phase) {
  ShardSquares squares;
  squares.totals = TotalsOf(round, phase);
  squares.fate = FateOf(round, {});
  squares.runs.resize(NormPhases(parts_.job)[phase].size() * sums_.runs(parts_.shard_index));
  if (squares.fate == v1::FATE_SKIPPED) return squares;  // without norms
  for (const auto& bucket : parts_.buckets) {
    for (const uint32_t tensor : TensorsOf(*bucket->layout)) {
      if (!squares.totals.contains(tensor)) return std::nullopt;
    }
  }
  return squares;
}

}  // namespace gradwire

// The shards of a job agree on each round before it is written: on the norms of whole tensors (LAMB, LANS, clip_norm),
// or on whether it is skipped because a gradient was not finite. proto/NORMS.md.
//
//   a bucket closes -> its squares, held (the thread that closes it) ... all buckets of the round
//     -> exchange, phase by phase -> norms into the update frames, or those of a skipped round in their place
//     -> the next stage, bucket by bucket (the thread that pumps)
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/codec/update/update.h"
#include "common/optimizer/norm_sums.h"
#include "gradwire/v1/peer.pb.h"
#include "server/job/job_parts.h"
#include "server/norms/norm_exchange.h"
#include "server/stages/stage.h"
#include "server/stages/turn.h"

namespace gradwire {

// A bucket whose update is finished, but neither written nor applied.
struct HeldBucket {
  ClosedBucket closed;
  std::shared_ptr<Update> update;  // closed.update.decoded
  std::vector<double> squares;     // for the phase that comes next: [norm][run of the slice]
};
// A round whose buckets have all closed here, and how far the shards are with it.
struct AgreeingRound {
  uint64_t round = 0;
  std::vector<HeldBucket> held;
  size_t phase = 0;
  bool offered = false;  // this shard has told the others its part of the phase
  bool skipped = false;
};

// Thread-safe. Owns its thread, from Start to Stop.
class Agreement final : public Stage {
 public:
  // `stop`: called where no bucket can go on after the round, with the reason.
  using StopJob = std::function<void(uint64_t round, const absl::Status& why)>;
  Agreement(JobParts* parts, StopJob stop, Stage* next);
  ~Agreement() override { Stop(); }

  // Whether the shards of the job have something to agree on.
  static bool IsNeededBy(const Job& job);
  // `turn`: stands in front of this stage and lets one round at a time in. ResourceExhausted: no thread, or the norms
  // do not fit into a message.
  absl::Status Start(Turn* turn);
  void Stop();
  // The journal was replayed; `round`: the oldest round that is not closed.
  void Restore(uint64_t round);

  // Round 0 passes at once: it calibrates.
  void Pass(ClosedBucket&& closed) override;

  // Without a thread of its own (JobEnvironment::tellers is null) one other thread calls Pump while HasWork. Pump goes
  // as far as what the shards have told each other allows.
  bool HasWork() const;
  void Pump();
  // Where the shards are, and whom to tell.
  NormExchange& exchange() { return exchange_; }

 private:
  void Run();
  absl::StatusOr<HeldBucket> Hold(ClosedBucket&& closed) const;
  // Whether there is a round to agree on: the one under way, or else the next, once all its buckets are held.
  bool TakeHeld();
  // Agrees phase by phase. False: other shards have not told their part yet.
  absl::StatusOr<bool> Agree(AgreeingRound* round);
  // What this shard has of the phase.
  absl::StatusOr<ShardSquares> SquaresOf(AgreeingRound* round);
  // Puts what the shards agreed on in the phase into the held updates; `sums`: [tensor][norm of the phase].
  void SetNorms(const std::vector<double>& sums, AgreeingRound* round);
  // Hands the round to the next stage.
  absl::Status PassOn(AgreeingRound* round);
  // Puts the update of a skipped round in the place of the held one.
  absl::Status Skip(HeldBucket* held);
  // Whether the round is skipped: by what was written of it, else by what is held.
  v1::RoundFate FateOf(uint64_t round, const std::vector<HeldBucket>& held);
  // The squares of tensors over all shards that retained updates of `round` tell.
  std::map<uint32_t, std::vector<double>> TotalsOf(uint64_t round, size_t phase);
  // This shard's squares of a round that it has written. Nothing: the round is not retained any more.
  std::optional<ShardSquares> WrittenSquares(uint64_t round, size_t phase);

  JobParts& parts_;
  const StopJob stop_;
  Stage& next_;
  Turn* turn_ = nullptr;  // constant from Start on
  const NormSums sums_;
  std::optional<AgreeingRound> agreeing_;  // used by the thread that pumps

  mutable absl::Mutex mu_;                   // innermost
  uint64_t round_ ABSL_GUARDED_BY(mu_) = 1;  // the round that is held; round 0 needs no norms
  std::vector<std::optional<HeldBucket>> held_ ABSL_GUARDED_BY(mu_);
  std::vector<uint64_t> versions_ ABSL_GUARDED_BY(mu_);  // of buckets that were recovered ahead of the others
  bool work_ ABSL_GUARDED_BY(mu_) = false;               // something came since Pump was called last
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
  NormExchange exchange_;
  std::thread thread_;
};

}  // namespace gradwire

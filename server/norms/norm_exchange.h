// What the shards of a job tell each other before they write: every shard tells its squares to every other one, and
// whether it has heard of a gradient that is not finite; when it has heard of all, it has the sums, and knows whether
// the round is skipped. proto/NORMS.md.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/job/job.h"
#include "common/job/layout.h"
#include "common/optimizer/norm_sums.h"
#include "common/transport/transport.h"
#include "gradwire/v1/peer.pb.h"
#include "server/norms/address_votes.h"
#include "server/norms/tellers.h"
#include "server/rounds/membership.h"

namespace gradwire {

// Thread-safe, and blocks nobody but the tellers. Borrows job and layout. The other shards are told on the server's
// Tellers, from Start to Stop: a shard that is down is tried again and again, and keeps none of the others waiting.
// Keeps the squares of rounds that other shards may still ask for: of as many as their servers, started again, may be
// behind.
class NormExchange final : public Telling {
 public:
  // What this shard knows of rounds that it wrote before it was started; may take locks of the job.
  using Written = std::function<std::optional<ShardSquares>(uint64_t round, size_t phase)>;

  // `tellers`: null where somebody else takes their turns (TakeNext, Begin, Answered, Ended). `heard`: another shard's
  // squares came, so TryAgree may have an answer; called without locks, by any thread.
  NormExchange(const Job* job, const Layout* layout, uint32_t shard, std::shared_ptr<Tellers> tellers, Written written,
               std::function<void()> heard);
  ~NormExchange() override;

  // Before the first exchange. ResourceExhausted: there is no thread for it.
  absl::Status Start();
  // Where the shards are, in order, as a worker says; alternatives are separated by '|'. InvalidArgument: not as many
  // as there are shards, or too long.
  absl::Status CheckAddresses(const std::vector<std::string>& addresses) const;
  // A member says so, for which CheckAddresses was ok: see AddressVotes.
  void SetAddresses(MemberId member, const std::vector<std::string>& addresses);
  void ForgetAddresses(MemberId member);  // it is no member any more
  // The rounds before this one are written.
  void SetRound(uint64_t round);
  // What the shards agree on.
  struct Agreed {
    std::vector<double> sums;  // [tensor][norm of the phase]
    bool skipped = false;      // the round; its later phases are not exchanged then
  };
  // What this shard has; the others are told. By one thread, rounds and phases in order.
  void Offer(uint64_t round, size_t phase, ShardSquares own);
  // Once, after Offer. Nothing: some shard has not told its squares yet, or Stop was called.
  std::optional<Agreed> TryAgree(uint64_t round, size_t phase);
  // Another shard tells. Errors: InvalidArgument, FailedPrecondition (another shard map; a round that is too far
  // ahead).
  absl::StatusOr<v1::ExchangeReply> Take(const v1::ExchangeRequest& request);
  // Nobody is told any more when it returns, within the time that a call may take. Idempotent.
  void Stop();

  // Telling, for Tellers.
  Next TakeNext(bool unproven, absl::Time now) override;
  void Tell(size_t to) override;

  // The parts of Tell: what shard `to` is told, at which address (nothing: it is told nothing any more); what it
  // answered, if it did; the end of the call in any case.
  using Key = std::pair<uint64_t, size_t>;  // round, phase
  struct Question {
    Key key;
    std::string address;
    std::string request;  // a v1::ExchangeRequest
  };
  std::optional<Question> Begin(size_t to) const;
  absl::Status Answered(size_t to, const Key& key, const std::string& reply, absl::Time now);
  void Ended(size_t to, bool told, absl::Time now);

 private:
  struct Own {
    v1::NormSums sums;
    std::vector<absl::Time> due;  // by shard: when it is told (again)
  };
  struct Theirs {
    std::vector<std::optional<ShardSquares>> of;  // by shard
    size_t missing = 0;
  };

  // To another shard.
  struct Line {
    std::shared_ptr<transport::Channel> channel;  // kept while it works
    std::string dialled;
    size_t alternative = 0;
    bool telling = false;
    bool proven = false;  // the last call was answered
    absl::Duration pause;
    absl::Time next = absl::InfinitePast();  // not before
    absl::Time warned = absl::InfinitePast();
  };

  void Note(const Key& key, uint32_t shard, ShardSquares squares) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The oldest of what `shard` is to be told, and is due first; null: nothing.
  const Key* ToTell(uint32_t shard) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool IsMissing(const Key& key, uint32_t shard) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Carry(size_t to, const Question& question);
  // How that ended: warns, now and then.
  void NoteTold(size_t to, const Question& question, const absl::Status& told);

  const Job& job_;
  const Layout& layout_;
  const uint32_t shard_;
  const std::vector<size_t> norms_;  // by phase: how many
  const NormSums sums_;
  const std::shared_ptr<Tellers> tellers_;
  const Written written_;
  const std::function<void()> heard_;

  mutable absl::Mutex mu_;
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t round_ ABSL_GUARDED_BY(mu_) = 0;
  AddressVotes addresses_ ABSL_GUARDED_BY(mu_);
  std::map<Key, Own> own_ ABSL_GUARDED_BY(mu_);
  std::map<Key, Theirs> theirs_ ABSL_GUARDED_BY(mu_);
  std::vector<Line> lines_ ABSL_GUARDED_BY(mu_);  // by shard
  uint32_t turn_ ABSL_GUARDED_BY(mu_) = 0;        // the shard that is looked at first
};

}  // namespace gradwire

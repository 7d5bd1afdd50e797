// What must have happened: hears of every frame that workers encode, of every record that shards write, of every
// version that workers see, and checks them against each other. Knows nothing of rounds, acknowledgements or retries.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "client/cpp/internal/replica.h"
#include "client/cpp/internal/round_ledger.h"
#include "common/codec/codec.h"
#include "common/codec/update/update.h"
#include "common/journal/record.h"
#include "tests/sim/setup.h"
#include "tests/sim/world.h"

namespace gradwire::sim {

inline constexpr TimeNs kWriteSlack = 100 * kMs;  // that a record may wait for its write beside the interval of syncs

// Not thread-safe.
class Oracle {
 public:
  using Entry = client::RoundLedger::Entry;

  Oracle(World* world, const Setup* setup);

  // A worker made this frame. Members never make two frames for one entry.
  void Encoded(uint64_t member, Entry entry, const EncodedFrame& frame);
  // A worker abstains, as its gradient is not finite, and asks that the round be skipped.
  void SkipAsked(uint64_t member, Entry entry) { skip_asked_.insert({member, {entry.round, entry.slice}}); }
  // A frame of this round may not have come as it was made: a shard may have refused it, and taken it as abstaining.
  void Damaged(uint64_t round) { damaged_.insert(round); }
  // A shard hands a record to its journal. An update must be what the frames of the contributions that it names give.
  void Appended(uint32_t shard, const journal::Record& record);
  // A standby takes a record: it must be that of its primary.
  void Followed(uint32_t shard, const journal::Record& record);
  // A worker was given the update frame of `entry`, or (empty chunks) the parameters that it makes.
  void Seen(Entry entry, const std::vector<Bytes>& chunks);
  // Asynchronous rounds. A worker sends this frame; whether it has sent these bytes before.
  bool Pushed(uint64_t member, Entry entry, const std::vector<Bytes>& chunks);
  // The parameters of one slice at `version`, as `who` has them.
  void CheckSlice(uint32_t slice, uint64_t version, const std::vector<float>& values, const std::string& who);
  // All gradients that a worker was given are in versions that were seen or in what it keeps (`pending`), once each.
  // Both by tensor.
  void CheckConserved(uint64_t member, const std::vector<std::vector<double>>& fed,
                      const std::vector<std::vector<float>>& pending, const std::string& who);
  // As Recovered. `versions`: by bucket.
  void RecoveredAsync(uint32_t shard, const std::vector<uint64_t>& versions, uint64_t epoch, bool may_lose,
                      std::optional<TimeNs> synced_until);

  // A worker has settled `entry`: `included` is what it thinks of its own frame. `outlived`: see Outlived.
  void Settled(uint64_t member, Entry entry, bool included, bool outlived);
  // The round of `entry` was skipped.
  bool Skipped(Entry entry) const {
    const std::vector<Made>& made = made_[entry.slice];
    return entry.round < made.size() && made[entry.round].update.skipped;
  }
  // The parameters of one shard at `version`, as `who` has them.
  void CheckDigest(uint32_t shard, uint64_t version, const std::string& digest, const std::string& who);
  // A shard came back with `version`, its server with `epoch`. `may_lose`: versions that were seen. `synced_until`:
  // those that were seen more than an interval of syncs before it must be there none the less; nothing: no such
  // promise.
  void Recovered(uint32_t shard, uint64_t version, uint64_t epoch, bool may_lose, std::optional<TimeNs> synced_until);
  // Versions of a server with `epoch` were lost since: who still reads its answers reads what is not checked any more.
  bool Outlived(uint32_t shard, uint64_t epoch) const { return epoch < lost_before_[shard]; }

 private:
  struct Made {
    std::vector<Bytes> chunks;
    std::map<uint64_t, bool> contributions;  // by member: included
    Update update;
    std::vector<float> values;  // of asynchronous rounds: its mean, in the order of the slice
    std::optional<TimeNs> seen;
  };
  struct Frame {
    std::vector<Bytes> chunks;
    std::vector<uint32_t> positions;
    std::vector<int32_t> integers;
  };
  // The parameters of one shard, from the update frames alone.
  struct Replay {
    std::vector<std::vector<float>> memory;
    std::unique_ptr<client::Replica> replica;
    std::vector<std::string> digests;  // by version
  };

  // The same of one slice, with asynchronous rounds.
  struct SliceReplay {
    std::vector<std::vector<float>> memory;
    std::unique_ptr<client::Replica> replica;
    std::vector<std::vector<float>> values;  // by version
  };

  static bool Same(const std::vector<Bytes>& a, const std::vector<Bytes>& b);
  std::unique_ptr<client::Replica> NewReplica(std::vector<std::vector<float>>* memory) const;
  // Asynchronous rounds: what the frame alone gives.
  absl::StatusOr<std::vector<Bytes>> MergeOne(Entry entry, const journal::Contribution& of, const RoundPlan& plan);
  const std::vector<float>& ValuesOf(uint32_t slice, uint64_t version);
  std::vector<float> MeanOf(uint32_t slice, const Update& update);
  uint32_t ShardOf(uint32_t slice) const { return setup_->LayoutOf(slice).shard; }
  RoundPlan PlanOf(Entry entry) const;
  // Merges the frames that the record names. Nothing: a violation was found.
  absl::StatusOr<std::vector<Bytes>> Merge(Entry entry, const journal::Record& record, const RoundPlan& plan,
                                           bool skipped);
  // The shards agreed: what the slices of a round say of a tensor, and of all, is the same, and so is its fate.
  void CheckAgreed(uint64_t round);
  void CheckFate(uint64_t round, bool corner);
  void CheckNorms(uint64_t round);
  void CheckSums(Entry entry, const journal::Record& record, const Update& update);
  void StartReplay(uint32_t shard);
  bool Advance(uint32_t shard, uint64_t version);
  uint64_t SeenVersion(uint32_t slice) const;

  World* const world_;
  const Setup* const setup_;
  std::vector<std::vector<Made>> made_;                                         // by slice and round
  std::map<std::pair<uint64_t, std::pair<uint64_t, uint32_t>>, Frame> frames_;  // by member, round, slice
  std::map<std::pair<uint64_t, uint32_t>, std::set<uint64_t>> unsettled_;  // by member and slice: rounds of its frames
  std::vector<Replay> replays_;                                            // by shard
  std::vector<uint64_t> lost_before_;  // by shard: the epoch of the last server that came back without all versions
  uint64_t starts_ = 0;                // of servers
  std::set<uint64_t> members_;         // that made a frame
  std::set<uint64_t> damaged_;         // rounds, see Damaged
  std::set<std::pair<uint64_t, std::pair<uint64_t, uint32_t>>> skip_asked_;                               // as frames_
  std::map<std::pair<uint64_t, std::pair<uint64_t, uint32_t>>, std::vector<std::vector<Bytes>>> pushed_;  // as frames_
  std::vector<SliceReplay> slice_replays_;
  std::vector<std::unique_ptr<Accumulator>> accumulators_;
};

}  // namespace gradwire::sim

// See oracle.h.
#include "tests/sim/oracle.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/codec/frame/frame_assembler.h"
#include "common/codec/plan/plan_window.h"
#include "common/job/norms.h"
#include "common/job/round_mode.h"
#include "common/wire/frame.h"

namespace gradwire::sim {
bool Oracle::Same(const std::vector<Bytes>& a, const std::vector<Bytes>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Bytes& x, const Bytes& y) {
    return std::equal(x.span().begin(), x.span().end(), y.span().begin(), y.span().end());
  });
}

Oracle::Oracle(World* world, const Setup* setup)
    : world_(world),
      setup_(setup),
      made_(setup->slices()),
      replays_(setup->shards),
      lost_before_(setup->shards),
      slice_replays_(setup->slices()) {
  for (const auto& codec : setup->codecs) accumulators_.push_back(codec->NewAccumulator());
  for (uint32_t shard = 0; shard < setup->shards; ++shard) StartReplay(shard);
}

void Oracle::StartReplay(uint32_t shard) {
  Replay& replay = replays_[shard];
  replay.memory = setup_->InitialParameters();
  replay.replica = NewReplica(&replay.memory);
  replay.digests = {replay.replica->ShardDigest(shard)};
}

std::unique_ptr<client::Replica> Oracle::NewReplica(std::vector<std::vector<float>>* memory) const {
  return std::make_unique<client::Replica>(
      setup_->job.get(), setup_->layout.get(), client::MakeHostMemory(setup_->backend.get()),
      std::vector<std::span<float>>(memory->begin(), memory->end()), /*with_moments=*/true);
}

void Oracle::Encoded(uint64_t member, Entry entry, const EncodedFrame& frame) {
  members_.insert(member);
  Frame& kept = frames_[{member, {entry.round, entry.slice}}];
  if (!kept.chunks.empty())
    world_->Violate(absl::StrCat("round ", entry.round, " slice ", entry.slice, " was encoded twice by one worker"));
  kept = {frame.chunks, frame.positions, frame.integers};
  std::set<uint64_t>& unsettled = unsettled_[{member, entry.slice}];
  unsettled.insert(entry.round);
  if (*unsettled.begin() + setup_->staleness() < entry.round)
    world_->Violate(absl::StrCat("round ", *unsettled.begin(), " of slice ", entry.slice,
                                 ": a worker goes on, and its frame was neither settled nor returned: lost"));
}

RoundPlan Oracle::PlanOf(Entry entry) const {
  const uint64_t version = setup_->async() ? entry.round : PlanVersion(*setup_->job, entry.round);
  return version == 0 ? setup_->codecs[entry.slice]->InitialPlan() : made_[entry.slice][version - 1].update.next;
}

void Oracle::Appended(uint32_t shard, const journal::Record& record) {
  if (record.type != journal::RecordType::kUpdate) return;
  const Entry entry{record.round, setup_->layout->slice_of(record.bucket, shard)};
  std::vector<Made>& made = made_[entry.slice];
  const std::string where = absl::StrCat("shard ", shard, " bucket ", record.bucket, " round ", record.round);
  if (record.round > made.size()) return world_->Violate(absl::StrCat(where, " was made before round ", made.size()));
  if (record.round < made.size() && made[record.round].seen)
    return world_->Violate(
        absl::StrCat(where, " is made again: the version that it made was seen by a worker and is lost"));
  made.resize(record.round);
  const bool async = setup_->async();
  if (async && record.contributions.size() != 1)
    return world_->Violate(absl::StrCat(where, " has ", record.contributions.size(), " contributions"));
  const RoundPlan plan = PlanOf(async ? Entry{record.contributions[0].round, entry.slice} : entry);
  auto update = DecodeUpdate(record.chunks, *setup_->job, setup_->LayoutOf(entry.slice), plan);
  if (!update.ok()) return world_->Violate(absl::StrCat(where, ": ", update.status().ToString()));
  auto merged = async ? MergeOne(entry, record.contributions[0], plan) : Merge(entry, record, plan, update->skipped);
  if (!merged.ok()) return world_->Violate(absl::StrCat(where, ": ", merged.status().ToString()));
  if (entry.round > 0 && !update->skipped) AppendNorms(*setup_->job, *update, &*merged);
  if (!Same(*merged, record.chunks))
    return world_->Violate(absl::StrCat(where, ": the update is not the sum of the frames that its record names"));
  if (!update->skipped && !async) CheckSums(entry, record, *update);
  if (!update->deferred.empty()) world_->Count(Event::kDeferredElements);
  Made& now = made.emplace_back();
  now.chunks = record.chunks;
  if (async) now.values = MeanOf(entry.slice, *update);
  now.update = *std::move(update);
  for (const journal::Contribution& c : record.contributions) now.contributions[c.member] = c.included;
}

void Oracle::Followed(uint32_t shard, const journal::Record& record) {
  if (record.type != journal::RecordType::kUpdate) return;
  const std::vector<Made>& made = made_[setup_->layout->slice_of(record.bucket, shard)];
  if (record.round >= made.size() || !Same(made[record.round].chunks, record.chunks))
    world_->Violate(absl::StrCat("the standby of shard ", shard, " takes an update of round ", record.round,
                                 " that is not its primary's"));
}

absl::StatusOr<std::vector<Bytes>> Oracle::Merge(Entry entry, const journal::Record& record, const RoundPlan& plan,
                                                 bool skipped) {
  Accumulator& accumulator = *accumulators_[entry.slice];
  accumulator.Open(entry.round, plan);
  uint32_t included = 0;
  std::vector<float> rates(1);  // of a round without frames
  for (const journal::Contribution& c : record.contributions) {
    if (!c.included) continue;
    const auto frame = frames_.find({c.member, {entry.round, entry.slice}});
    if (frame == frames_.end()) return absl::InternalError("a contribution was merged that no worker made");
    FrameAssembler assembler(setup_->codecs[entry.slice].get(), &setup_->LayoutOf(entry.slice), &accumulator, &plan,
                             entry.round, UINT64_MAX);
    std::vector<uint8_t> scratch;
    for (const Bytes& chunk : frame->second.chunks) {
      GW_ASSIGN_OR_RETURN(const wire::Chunk parsed, wire::ParseReceived({&chunk, 1}, &scratch));
      GW_RETURN_IF_ERROR(assembler.Add(parsed, {&chunk, 1}));
    }
    if (assembler.digest() != c.digest) return absl::InternalError("another frame was merged than the worker made");
    assembler.Commit();
    rates = {kLearningRate};
    ++included;
  }
  FrameIdentity id;
  id.shard = static_cast<uint16_t>(ShardOf(entry.slice));
  id.bucket = record.bucket;
  id.round = entry.round;
  id.learning_rates = rates;
  id.nonfinite_rounds = entry.round == 0 ? 0 : made_[entry.slice][entry.round - 1].update.nonfinite_rounds;
  if (skipped) {
    ++id.nonfinite_rounds;
    return SkippedUpdate(id, setup_->LayoutOf(entry.slice), plan).chunks;
  }
  GW_ASSIGN_OR_RETURN(UpdateFrame update, accumulator.Finish(id, included));
  return std::move(update.chunks);
}

void Oracle::CheckAgreed(uint64_t round) {
  // What nobody has seen may have been lost with its server.
  const auto is_seen = [&](const std::vector<Made>& made) { return round < made.size() && made[round].seen; };
  if (round == 0 || setup_->async() || !std::all_of(made_.begin(), made_.end(), is_seen)) return;
  // The corner that NORMS.md names: a shard that died may have had other frames in the round. Not where they are those
  // of all workers that there ever were, and none was damaged on its way.
  const bool all_in_it = std::all_of(made_.begin(), made_.end(), [&](const std::vector<Made>& made) {
    return made[round].contributions.size() == setup_->workers;
  });
  const bool others_before = damaged_.contains(round) || setup_->job->spec().rounds().quorum() > 0 ||
                             members_.size() > setup_->workers || !all_in_it ||
                             world_->coverage()[static_cast<size_t>(Event::kLeaseExpired)] > 0;
  const bool corner = starts_ > setup_->shards && others_before;
  if (SkipsNonFinite(*setup_->job)) CheckFate(round, corner);
  if (!world_->violated() && !corner && !made_[0][round].update.norms.empty()) CheckNorms(round);
}

// All slices alike, whatever died; skipped where somebody in the round asked for it, and only there.
void Oracle::CheckFate(uint64_t round, bool corner) {
  const bool skipped = made_[0][round].update.skipped;
  if (skipped) world_->Count(Event::kRoundNotApplied);
  bool asked = false;
  for (uint32_t slice = 0; slice < setup_->slices(); ++slice) {
    const Made& made = made_[slice][round];
    if (made.update.skipped != skipped)
      return world_->Violate(absl::StrCat("round ", round, ": slice ", slice, " was ", skipped ? "applied" : "skipped",
                                          ", unlike those before it: the shards did not agree"));
    for (const auto& [member, included] : made.contributions)
      asked = asked || (!included && skip_asked_.contains({member, {round, slice}}));
  }
  if (asked == skipped || corner || damaged_.contains(round)) return;
  world_->Violate(absl::StrCat("round ", round,
                               skipped ? " was skipped, and nobody in it asked for that"
                                       : " was applied, and a worker in it asked that it be skipped"));
}

void Oracle::CheckNorms(uint64_t round) {
  const size_t count = NormsOf(*setup_->job).size();
  std::map<uint32_t, std::vector<double>> norms;  // by tensor
  for (uint32_t slice = 0; slice < setup_->slices(); ++slice) {
    const Update& update = made_[slice][round].update;
    bool same = update.mean_square == made_[0][round].update.mean_square;
    const std::vector<uint32_t> tensors = TensorsOf(setup_->LayoutOf(slice));
    for (size_t i = 0; i < tensors.size(); ++i) {
      const auto begin = update.norms.begin() + static_cast<ptrdiff_t>(i * count);
      const std::vector<double> here(begin, begin + static_cast<ptrdiff_t>(count));
      same = same && norms.try_emplace(tensors[i], here).first->second == here;
    }
    if (!same)
      return world_->Violate(absl::StrCat("round ", round, ": slice ", slice,
                                          " was made with other norms than those before it: the shards did not agree"));
  }
}

// Of sparse codecs, whose frames say which integers they carry: no accumulator takes part in this.
void Oracle::CheckSums(Entry entry, const journal::Record& record, const Update& update) {
  if (!setup_->codecs[entry.slice]->sparse() || entry.round == 0) return;
  if (update.integers.size() != update.positions.size()) return;  // sums as floats
  std::map<uint32_t, int64_t> sums;
  for (const journal::Contribution& c : record.contributions) {
    if (!c.included) continue;
    const Frame& frame = frames_.at({c.member, {entry.round, entry.slice}});
    for (size_t i = 0; i < frame.positions.size(); ++i) sums[frame.positions[i]] += frame.integers[i];
  }
  for (uint32_t position : update.deferred) sums.erase(position);
  for (size_t i = 0; i < update.positions.size(); ++i) {
    if (update.integers[i] == 0) continue;
    const auto sum = sums.find(update.positions[i]);
    if (sum == sums.end() || sum->second != update.integers[i])
      return world_->Violate(absl::StrCat("round ", entry.round, " slice ", entry.slice, " position ",
                                          update.positions[i], ": the update has ", update.integers[i],
                                          ", the workers sent ", sum == sums.end() ? 0 : sum->second));
    sums.erase(sum);
  }
  for (const auto& [position, sum] : sums)
    if (sum != 0)
      return world_->Violate(absl::StrCat("round ", entry.round, " slice ", entry.slice, " position ", position,
                                          ": the workers sent ", sum, ", the update neither has nor defers it"));
}

void Oracle::Seen(Entry entry, const std::vector<Bytes>& chunks) {
  std::vector<Made>& made = made_[entry.slice];
  const std::string where = absl::StrCat("round ", entry.round, " of slice ", entry.slice);
  if (entry.round >= made.size())
    return world_->Violate(absl::StrCat(where, " was seen by a worker, and no shard has made it"));
  if (!chunks.empty() && !Same(chunks, made[entry.round].chunks))
    return world_->Violate(absl::StrCat(where, ": a worker was given other bytes than the shard has journaled"));
  for (uint64_t round = entry.round; !made[round].seen; --round) {
    made[round].seen = world_->Now();  // and so were those before it
    CheckAgreed(round);
    if (round == 0) break;
  }
}

void Oracle::Settled(uint64_t member, Entry entry, bool included, bool outlived) {
  unsettled_[{member, entry.slice}].erase(entry.round);
  if (!CarriesValues(*setup_->job, entry.round) || outlived) return;
  const std::vector<Made>& made = made_[entry.slice];
  if (entry.round >= made.size()) return world_->Violate("a worker settled a round that no shard has made");
  const auto contribution = made[entry.round].contributions.find(member);
  const bool applied = contribution != made[entry.round].contributions.end() && contribution->second;
  if (applied == included) return;
  world_->Violate(absl::StrCat("round ", entry.round, " of slice ", entry.slice,
                               applied ? ": a contribution was applied, and returned to the worker's residual: twice"
                                       : ": a contribution was neither applied nor returned: lost"));
}

bool Oracle::Advance(uint32_t shard, uint64_t version) {
  Replay& replay = replays_[shard];
  while (replay.digests.size() <= version) {
    const uint64_t round = replay.digests.size() - 1;
    for (const uint32_t slice : setup_->layout->slices_of(shard))
      if (round >= made_[slice].size()) return false;
    for (const uint32_t slice : setup_->layout->slices_of(shard)) {
      const absl::Status applied = replay.replica->Apply(setup_->LayoutOf(slice), made_[slice][round].update);
      if (!applied.ok()) world_->Violate(absl::StrCat("the replay of the updates failed: ", applied.ToString()));
    }
    replay.digests.push_back(replay.replica->ShardDigest(shard));
  }
  return true;
}

void Oracle::CheckDigest(uint32_t shard, uint64_t version, const std::string& digest, const std::string& who) {
  if (!Advance(shard, version))
    return world_->Violate(absl::StrCat(who, " has version ", version, " of shard ", shard, ", which was never made"));
  if (replays_[shard].digests[version] == digest) return;
  world_->Violate(absl::StrCat(who, " has parameters of shard ", shard, " at version ", version,
                               " that differ from the replay of the update frames"));
}

uint64_t Oracle::SeenVersion(uint32_t slice) const {
  const std::vector<Made>& made = made_[slice];
  const auto last = std::find_if(made.rbegin(), made.rend(), [](const Made& m) { return m.seen.has_value(); });
  return static_cast<uint64_t>(made.rend() - last);
}

void Oracle::Recovered(uint32_t shard, uint64_t version, uint64_t epoch, bool may_lose,
                       std::optional<TimeNs> synced_until) {
  ++starts_;
  bool lost = false;
  uint64_t all_seen = UINT64_MAX;
  const uint64_t apart = MostApart(*setup_->job);
  for (const uint32_t slice : setup_->layout->slices_of(shard)) {
    const uint64_t seen = SeenVersion(slice);
    all_seen = std::min(all_seen, seen);
    // Only some buckets of the rounds behind `version` may be there, and which is not known here.
    lost = lost || seen > version + apart;
  }
  lost = lost || all_seen > version;
  if (lost && !may_lose)
    return world_->Violate(
        absl::StrCat("shard ", shard, " came back with version ", version, "; workers have seen ", all_seen));
  if (!may_lose) return;
  if (lost) world_->Count(Event::kRolledBack);
  for (const uint32_t slice : setup_->layout->slices_of(shard)) {
    std::vector<Made>& made = made_[slice];
    for (uint64_t round = version + apart; round < made.size() && synced_until; ++round) {
      const TimeNs promised = *synced_until - setup_->job->spec().durability().interval_ms() * kMs - kWriteSlack;
      if (made[round].seen && *made[round].seen < promised && made[round - 1].seen)
        return world_->Violate(absl::StrCat("shard ", shard, " came back with version ", version, "; version ",
                                            round + 1, " was seen longer ago than the interval of syncs"));
    }
    if (made.size() > version) lost_before_[shard] = epoch;  // answers with them may be on their way
    if (made.size() > version + apart) made.resize(version + apart);
    for (uint64_t round = version; round < made.size(); ++round) made[round].seen.reset();
  }
  if (replays_[shard].digests.size() > version + 1) StartReplay(shard);
}

}  // namespace gradwire::sim

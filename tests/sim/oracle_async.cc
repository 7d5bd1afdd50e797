// Asynchronous rounds: each version of a slice is made by one frame, by the plan of the version that it was made on;
// see oracle.h.
#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/codec/frame/frame_assembler.h"
#include "common/wire/frame.h"
#include "tests/sim/oracle.h"

namespace gradwire::sim {
namespace {

// Of one element: what codecs round off, over a run. A frame that is lost or comes twice is off by about 1.
constexpr double kTolerance = 0.01;

// The plan of the next version keeps what the plan of an older one does not know and the newest does.
RoundPlan Completed(RoundPlan plan, const RoundPlan& newest) {
  for (size_t run = 0; run < plan.exponents.size() && run < newest.exponents.size(); ++run)
    if (plan.exponents[run] == kUncalibrated) plan.exponents[run] = newest.exponents[run];
  return plan;
}

}  // namespace

bool Oracle::Pushed(uint64_t member, Entry entry, const std::vector<Bytes>& chunks) {
  std::vector<std::vector<Bytes>>& known = pushed_[{member, {entry.round, entry.slice}}];
  if (std::any_of(known.begin(), known.end(), [&](const auto& frame) { return Same(frame, chunks); })) return true;
  known.push_back(chunks);
  return false;
}

absl::StatusOr<std::vector<Bytes>> Oracle::MergeOne(Entry entry, const journal::Contribution& of,
                                                    const RoundPlan& plan) {
  const auto known = pushed_.find({of.member, {of.round, entry.slice}});
  if (known == pushed_.end()) return absl::InternalError("a contribution was merged that no worker made");
  Accumulator& accumulator = *accumulators_[entry.slice];
  const RoundPlan completed = Completed(plan, PlanOf(entry));
  for (const std::vector<Bytes>& frame : known->second) {
    accumulator.Open(of.round, completed);
    FrameAssembler assembler(setup_->codecs[entry.slice].get(), &setup_->LayoutOf(entry.slice), &accumulator, &plan,
                             of.round, UINT64_MAX);
    std::vector<uint8_t> scratch;
    for (const Bytes& chunk : frame) {
      GW_ASSIGN_OR_RETURN(const wire::Chunk parsed, wire::ParseReceived({&chunk, 1}, &scratch));
      GW_RETURN_IF_ERROR(assembler.Add(parsed, {&chunk, 1}));
    }
    if (assembler.digest() != of.digest) continue;
    assembler.Commit();
    FrameIdentity id;
    id.shard = static_cast<uint16_t>(ShardOf(entry.slice));
    id.bucket = setup_->LayoutOf(entry.slice).bucket;
    id.round = entry.round;
    id.learning_rates = {&kLearningRate, 1};
    GW_ASSIGN_OR_RETURN(UpdateFrame update, accumulator.Finish(id, 1));
    return std::move(update.chunks);
  }
  return absl::InternalError("another frame was merged than the worker made");
}

std::vector<float> Oracle::MeanOf(uint32_t slice, const Update& update) {
  std::vector<std::vector<float>> memory = setup_->InitialParameters();
  const std::unique_ptr<client::Replica> replica = NewReplica(&memory);
  const absl::Status written = replica->WriteMean(setup_->LayoutOf(slice), update);
  if (!written.ok()) world_->Violate(absl::StrCat("the mean of an update: ", written.ToString()));
  return replica->Gather(setup_->LayoutOf(slice));
}

const std::vector<float>& Oracle::ValuesOf(uint32_t slice, uint64_t version) {
  SliceReplay& replay = slice_replays_[slice];
  if (replay.replica == nullptr) {
    replay.memory = setup_->InitialParameters();
    replay.replica = NewReplica(&replay.memory);
    replay.values = {replay.replica->Gather(setup_->LayoutOf(slice))};
  }
  while (replay.values.size() <= version) {
    const Made& made = made_[slice][replay.values.size() - 1];
    const absl::Status applied = replay.replica->Apply(setup_->LayoutOf(slice), made.update);
    if (!applied.ok()) world_->Violate(absl::StrCat("the replay of the updates failed: ", applied.ToString()));
    replay.values.push_back(replay.replica->Gather(setup_->LayoutOf(slice)));
  }
  return replay.values[version];
}

void Oracle::CheckSlice(uint32_t slice, uint64_t version, const std::vector<float>& values, const std::string& who) {
  if (version > made_[slice].size())
    return world_->Violate(absl::StrCat(who, " has version ", version, " of slice ", slice, ", which was never made"));
  if (values == ValuesOf(slice, version)) return;
  world_->Violate(absl::StrCat(who, " has parameters of slice ", slice, " at version ", version,
                               " that differ from the replay of the update frames"));
}

void Oracle::CheckConserved(uint64_t member, const std::vector<std::vector<double>>& fed,
                            const std::vector<std::vector<float>>& pending, const std::string& who) {
  std::vector<std::vector<double>> missing = fed;
  for (size_t t = 0; t < fed.size(); ++t)
    for (size_t i = 0; i < fed[t].size(); ++i) missing[t][i] -= pending[t][i];
  for (uint32_t slice = 0; slice < setup_->slices(); ++slice) {
    for (const Made& made : made_[slice]) {
      if (!made.seen || !made.contributions.contains(member)) continue;
      size_t at = 0;
      for (const gradwire::Run& run : setup_->LayoutOf(slice).runs)
        for (uint64_t i = 0; i < run.length; ++i) missing[run.tensor][run.offset + i] -= made.values[at++];
    }
  }
  for (size_t t = 0; t < fed.size(); ++t)
    for (size_t i = 0; i < fed[t].size(); ++i)
      if (std::fabs(missing[t][i]) > kTolerance)
        return world_->Violate(absl::StrCat(who, ": of element ", i, " of tensor ", t, " gradients of ", fed[t][i],
                                            " were given, ", missing[t][i],
                                            " of it was neither applied nor waits to be sent"));
}

void Oracle::RecoveredAsync(uint32_t shard, const std::vector<uint64_t>& versions, uint64_t epoch, bool may_lose,
                            std::optional<TimeNs> synced_until) {
  bool lost = false;
  for (const uint32_t slice : setup_->layout->slices_of(shard)) {
    const uint64_t version = versions[setup_->LayoutOf(slice).bucket];
    std::vector<Made>& made = made_[slice];
    if (SeenVersion(slice) > version) {
      lost = true;
      const TimeNs seen = *made[version].seen;
      const TimeNs promised =
          synced_until ? *synced_until - setup_->job->spec().durability().interval_ms() * kMs - kWriteSlack : 0;
      if (!may_lose || (synced_until && seen < promised))
        return world_->Violate(absl::StrCat("slice ", slice, " came back with version ", version,
                                            "; workers have seen ", SeenVersion(slice)));
    }
    if (made.size() > version) {
      if (may_lose) lost_before_[shard] = epoch;  // answers with them may be on their way
      made.resize(version);
    }
    if (slice_replays_[slice].values.size() > version + 1) slice_replays_[slice] = SliceReplay();
  }
  if (lost) world_->Count(Event::kRolledBack);
  StartReplay(shard);
}

}  // namespace gradwire::sim

// See past_rounds.h.
#include "server/job/past_rounds.h"

#include <map>
#include <memory>
#include <utility>

#include "common/base/status_macros.h"
#include "common/codec/frame/parameters.h"
#include "common/wire/frame.h"

namespace gradwire {
namespace {

journal::Contribution ContributionOf(const PushHistory::Merged& frame) {
  return {frame.id, "", 0, frame.digest, true, frame.round};
}

journal::Record StateOf(BucketState& bucket, std::vector<journal::Contribution> merged)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(bucket.mu) {
  return {journal::RecordType::kState, bucket.layout->bucket, bucket.version, std::move(merged),
          bucket.store->Serialize(bucket.plans, ParameterContent::kShard).Take()};
}

// What kind of update workers that are away are still owed, see OwedUpdates.
bool IsOwed(const BucketState& bucket, bool skipped, bool replaces) {
  return skipped || (bucket.codec->defers() && !replaces);
}

}  // namespace

void PastRounds::LimitOwed(BucketState& bucket) {
  if (bucket.owed.empty()) return;
  absl::MutexLock lock(&parts_.mu);
  const uint32_t b = bucket.layout->bucket;
  std::erase_if(bucket.owed, [&](const auto& owed) ABSL_EXCLUSIVE_LOCKS_REQUIRED(parts_.mu) {
    return !parts_.rounds->MayAskFor(b, owed.first - 1);
  });
  while (bucket.owed.size() > OwedUpdates(parts_.job)) {
    bucket.owed_from = bucket.owed.begin()->first + 1;
    bucket.owed.erase(bucket.owed.begin());
  }
}

void PastRounds::KeepOwed(BucketState& bucket, const journal::Record& record) {
  bucket.owed[record.round + 1] = std::make_shared<const wire::FrameToSend>(record.chunks);
  LimitOwed(bucket);
}

std::vector<journal::Record> PastRounds::RecordsBefore(BucketState& bucket, uint64_t round) {
  LimitOwed(bucket);
  const uint32_t index = bucket.layout->bucket;
  std::map<uint64_t, journal::Record> kept;
  absl::MutexLock lock(&parts_.mu);
  for (const PushHistory::Merged& frame : parts_.rounds->MergedOf(index)) {
    if (frame.round >= round) continue;
    const auto [it, added] =
        kept.try_emplace(frame.round, journal::Record{journal::RecordType::kKept, index, frame.round, {}, {}});
    it->second.contributions.push_back(ContributionOf(frame));
    const auto owed = bucket.owed.find(frame.round + 1);
    if (added && owed != bucket.owed.end()) it->second.chunks = owed->second->pieces();
  }
  std::vector<journal::Record> records;
  for (auto& [of, record] : kept) records.push_back(std::move(record));
  return records;
}

void PastUpdates::Keep(BucketState& bucket, const UpdateFrame& update, std::vector<journal::Contribution> who) {
  RetainedUpdate retained;
  retained.frame = std::make_shared<const wire::FrameToSend>(update.chunks);
  retained.is_owed = IsOwed(bucket, update.skipped, update.replaces);
  retained.skipped = update.skipped;
  retained.who = std::move(who);
  OpenRound* const made_by = bucket.Find(bucket.version - 1);
  if (made_by != nullptr && made_by->replacement) retained.share = std::move(made_by->replacement->share);
  Retain(bucket, bucket.version, std::move(retained));
}

absl::Status PastUpdates::KeepReplayed(BucketState& bucket, const journal::Record& record) {
  GW_ASSIGN_OR_RETURN(const wire::FrameHeader header, wire::ParseHeader(record.chunks[0].span()));
  const bool skipped = (header.flags & wire::kNonFinite) != 0;
  Retain(bucket, record.round + 1,
         {std::make_shared<const wire::FrameToSend>(record.chunks),
          IsOwed(bucket, skipped, (header.flags & wire::kReplace) != 0), skipped, record.contributions});
  return absl::OkStatus();
}

void PastUpdates::Retain(BucketState& bucket, uint64_t version, RetainedUpdate update) {
  bucket.updates.push_back(std::move(update));
  if (bucket.updates.size() <= RetainedUpdates(parts_.job)) return;
  RetainedUpdate oldest = std::move(bucket.updates.front());
  bucket.updates.pop_front();
  if (oldest.is_owed) bucket.owed[version - RetainedUpdates(parts_.job)] = std::move(oldest.frame);
  LimitOwed(bucket);
}

std::vector<journal::Record> PastUpdates::CopyOf(BucketState& bucket) {
  std::vector<journal::Record> records = {StateOf(bucket, {})};
  uint64_t round = bucket.version - bucket.updates.size();
  for (journal::Record& record : RecordsBefore(bucket, round)) records.push_back(std::move(record));
  for (const RetainedUpdate& update : bucket.updates) {
    records.push_back(
        {journal::RecordType::kUpdate, bucket.layout->bucket, round++, update.who, update.frame->pieces()});
  }
  return records;
}

std::vector<journal::Record> PastFrames::CopyOf(BucketState& bucket) {
  std::vector<journal::Contribution> merged;
  {
    absl::MutexLock lock(&parts_.mu);
    for (const PushHistory::Merged& frame : parts_.rounds->MergedOf(bucket.layout->bucket)) {
      if (bucket.version - frame.round > journal::kMaxContributionAge) continue;
      merged.push_back(ContributionOf(frame));
    }
  }
  return {StateOf(bucket, std::move(merged))};
}

}  // namespace gradwire

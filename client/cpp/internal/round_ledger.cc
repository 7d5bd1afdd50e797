// See round_ledger.h.
#include "client/cpp/internal/round_ledger.h"

#include <algorithm>
#include <utility>

#include "common/job/pull_kinds.h"

namespace gradwire::client {

RoundLedger::RoundLedger(Rules rules, uint64_t round)
    : rules_(std::move(rules)), slices_(static_cast<uint32_t>(rules_.slices.size())), round_(round) {}

void RoundLedger::Open() {
  Round round;
  round.slices.resize(slices_);
  for (uint32_t i = 0; i < slices_; ++i) {
    round.slices[i].update_missing = rules_.updates[i] != v1::PULL_UNSPECIFIED;
    round.slices[i].parameters_missing = rules_.parameters != v1::PULL_UNSPECIFIED;
  }
  rounds_.push_back(std::move(round));
}

void RoundLedger::Close() {
  rounds_.erase(rounds_.begin());
  ++round_;
}

void RoundLedger::MoveTo(uint64_t round) {
  rounds_.clear();
  round_ = round;
  dropped_ = false;
  gone_ = false;
}

void RoundLedger::Abstains(Entry entry) { At(entry).abstained = true; }

std::vector<v1::PullKind> RoundLedger::Wanted(Entry entry) const {
  const Slice& slice = At(entry);
  std::vector<v1::PullKind> kinds;
  if (slice.update_missing) {
    const v1::PullKind kind = rules_.updates[entry.slice];
    kinds.push_back(kind == v1::PULL_UNSPECIFIED ? v1::PULL_UPDATE : kind);
  }
  if (slice.parameters_missing) kinds.push_back(rules_.parameters);
  return kinds;
}

void RoundLedger::Sent(Entry entry, Actions* actions) {
  if (!IsOpen(entry.round)) return;
  SetSent(entry, true);
  CompleteIfDone(entry, actions);
}

RoundLedger::AckEffect RoundLedger::Acked(Entry entry, v1::PushOutcome outcome, std::optional<bool> abstained,
                                          Actions* actions) {
  if (!IsOpen(entry.round) || entry.slice >= slices_) return AckEffect::kIgnored;
  Slice& slice = At(entry);
  if (slice.acked) return AckEffect::kIgnored;
  const bool abstention = abstained.value_or(slice.abstained);
  if (outcome == v1::PUSH_REFUSED) {
    if (abstention) return AckEffect::kLost;
    if (slice.abstained) return AckEffect::kIgnored;  // its copy was refused before
    slice.abstained = true;
    actions->abstain.push_back(entry);
    return AckEffect::kRefused;
  }
  slice.acked = true;
  // A shard that has merged the frame before, and refused a damaged repeat of it, calls the abstention a duplicate.
  slice.included = outcome == v1::PUSH_DUPLICATE || (outcome == v1::PUSH_INCLUDED && !abstention);
  CompleteIfDone(entry, actions);
  return slice.abstained || slice.included ? AckEffect::kIncluded : AckEffect::kNotIncluded;
}

bool* RoundLedger::Missing(Entry entry, v1::PullKind kind) {
  Slice& slice = At(entry);
  if (IsOfUpdate(kind) && slice.update_missing) return &slice.update_missing;
  return kind == rules_.parameters && slice.parameters_missing ? &slice.parameters_missing : nullptr;
}

RoundLedger::AnswerEffect RoundLedger::Answered(Entry entry, v1::PullKind kind, Actions* actions) {
  if (!IsOpen(entry.round) || entry.slice >= slices_) return AnswerEffect::kUnexpected;
  bool* const missing = Missing(entry, kind);
  if (missing == nullptr) return AnswerEffect::kRepeated;
  *missing = false;
  CompleteIfDone(entry, actions);
  return AnswerEffect::kTaken;
}

RoundLedger::AnswerEffect RoundLedger::Gone(Entry entry, v1::PullKind kind, Actions* actions) {
  if (!IsOpen(entry.round) || entry.slice >= slices_) return AnswerEffect::kUnexpected;
  if (Missing(entry, kind) == nullptr) return AnswerEffect::kRepeated;
  gone_ = true;
  Slice& slice = At(entry);
  (IsOfUpdate(kind) ? slice.update_gone : slice.parameters_gone) = true;
  if (!IsOfUpdate(kind) && rules_.skips && rules_.updates[entry.slice] == v1::PULL_UNSPECIFIED) {
    slice.update_missing = true;
    actions->ask.push_back(entry);
  }
  return Answered(entry, kind, actions);
}

void RoundLedger::CompleteIfDone(Entry entry, Actions* actions) {
  Slice& slice = At(entry);
  if (slice.complete || !slice.sent || !slice.acked || slice.update_missing || slice.parameters_missing) return;
  slice.complete = true;
  actions->decode.push_back(entry);
}

void RoundLedger::Settled(Entry entry) {
  At(entry).settled = true;
  ++rounds_[entry.round - round_].settled;
}

bool RoundLedger::MayApply(Entry entry) const {
  for (uint64_t round = round_; round < entry.round; ++round) {
    if (!At({round, entry.slice}).settled) return false;
  }
  return rounds_.back().slices[entry.slice].sent;
}

uint64_t RoundLedger::version() const {
  uint64_t version = round_;
  for (const Round& round : rounds_) {
    if (round.settled < slices_) break;
    ++version;
  }
  return version;
}

void RoundLedger::SetSent(Entry entry, bool sent) {
  Slice& slice = At(entry);
  uint32_t& count = rounds_[entry.round - round_].sent;
  if (slice.sent != sent) sent ? ++count : --count;
  slice.sent = sent;
}

std::vector<RoundLedger::Entry> RoundLedger::Unanswered(uint32_t shard) const {
  std::vector<Entry> entries;
  for (uint64_t round = round_; IsOpen(round); ++round)
    for (uint32_t slice = 0; slice < slices_; ++slice) {
      const Slice& s = At({round, slice});
      if (rules_.slices[slice].shard == shard && s.sent && !s.complete) entries.push_back({round, slice});
    }
  return entries;
}

std::vector<uint32_t> RoundLedger::SeenBuckets(uint32_t shard) const {
  std::vector<uint32_t> seen;
  const bool parameters = rules_.parameters != v1::PULL_UNSPECIFIED;
  for (uint32_t slice = 0; slice < slices_; ++slice) {
    if (rules_.slices[slice].shard != shard) continue;
    size_t versions = 0;
    for (size_t i = 0; i < rounds_.size(); ++i) {
      const Slice& s = rounds_[i].slices[slice];
      const bool has_update = rules_.updates[slice] && !s.update_missing && !s.update_gone;
      const bool has_parameters = parameters && !s.parameters_missing && !s.parameters_gone;
      if (has_update || has_parameters) versions = i + 1;
    }
    seen.insert(seen.end(), versions, rules_.slices[slice].bucket);
  }
  return seen;
}

bool RoundLedger::SendAgain(Entry entry) {
  if (!IsOpen(entry.round) || At(entry).complete) return false;
  SetSent(entry, false);
  At(entry).acked = At(entry).included = false;
  return true;
}

template <typename F>
bool RoundLedger::EveryOf(uint32_t job_bucket, F is) const {
  const auto from = [this](uint32_t bucket) {
    return std::ranges::lower_bound(rules_.slices, bucket, {}, &BucketLayout::job_bucket) - rules_.slices.begin();
  };
  const auto begin = from(job_bucket), end = from(job_bucket + 1);
  return std::ranges::all_of(rounds_, [&](const Round& round) {
    return std::all_of(round.slices.begin() + begin, round.slices.begin() + end, is);
  });
}

bool RoundLedger::BucketAcked(uint32_t job_bucket) const {
  return EveryOf(job_bucket, [](const Slice& s) { return s.acked; });
}

bool RoundLedger::AllAcked() const {
  return std::ranges::all_of(rounds_, [](const Round& round) {
    return std::ranges::all_of(round.slices, [](const Slice& s) { return s.acked; });
  });
}

bool RoundLedger::BucketSettled(uint32_t job_bucket) const {
  return EveryOf(job_bucket, [](const Slice& s) { return s.settled; });
}

}  // namespace gradwire::client

// What a worker knows of its rounds: which frames were sent, how the shards judged them, what was answered, what
// travels again after a break, what goes back to the residual. A pure state machine: (state, event) -> (state,
// actions). No I/O, no clock, no threads, no locks: its owner (Exchange) serialises calls and moves the bytes, and a
// simulator can drive it.
//
//   one (round, slice):  Sent, Acked, Answered, in any order -> decode -> Settled
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "common/job/layout.h"
#include "gradwire/v1/worker.pb.h"

namespace gradwire::client {

class RoundLedger {
 public:
  struct Rules {
    std::span<const BucketLayout> slices;            // of the layout; outlives the ledger
    std::vector<v1::PullKind> updates;               // of slices whose update frames are wanted; else unspecified
    v1::PullKind parameters = v1::PULL_UNSPECIFIED;  // what is wanted of every slice beside them; unspecified: nothing
    bool skips = false;  // where parameters are gone, the update frame is wanted: it is kept if the round was skipped
  };
  // `slice`: index into Rules::slices.
  struct Entry {
    uint64_t round = 0;
    uint32_t slice = 0;
    bool operator==(const Entry&) const = default;
  };
  // What the owner has to do after an event. Appended to, never cleared, by the ledger.
  struct Actions {
    std::vector<Entry> abstain;  // send a frame that abstains: the shard refused the other one
    std::vector<Entry> decode;   // all that the slice needs is here
    std::vector<Entry> ask;      // for the update frame
  };
  enum class AckEffect {
    kIgnored,      // not of an open round, or acknowledged or refused before
    kIncluded,     // merged by the shard, or abstained as this worker meant to
    kNotIncluded,  // what it carried goes back to the residual
    kRefused,      // it abstains now
    kLost,         // it may not even abstain: the worker has no place in this round
  };
  enum class AnswerEffect {
    kTaken,
    kRepeated,    // it is here already, or was not wanted
    kUnexpected,  // its round is not open
  };

  // The first round to open is `round`.
  RoundLedger(Rules rules, uint64_t round);

  // Rounds open and close in order; several may be open.
  void Open();
  void Close();  // the oldest one
  // All open rounds are settled; the next one to open is `round`.
  void MoveTo(uint64_t round);

  // A frame that abstains takes the place of the one with values; before it is sent.
  void Abstains(Entry entry);
  // The kinds to ask for with the frame of an open round.
  std::vector<v1::PullKind> Wanted(Entry entry) const;
  // The frame was handed to the transport, and its bytes are not in use any more; whether it arrives is not known.
  void Sent(Entry entry, Actions* actions);
  // abstained: what is acknowledged did (a frame that was refused may have come twice, and be merged the second time);
  // nothing from servers that do not say it.
  AckEffect Acked(Entry entry, v1::PushOutcome outcome, std::optional<bool> abstained, Actions* actions);
  AnswerEffect Answered(Entry entry, v1::PullKind kind, Actions* actions);
  // The shard has this no longer: it is rounds ahead. The slice is settled without it, then the worker catches up.
  AnswerEffect Gone(Entry entry, v1::PullKind kind, Actions* actions);
  // `round` is open on a shard.
  void Heard(uint64_t round) { latest_ = std::max(latest_, round); }
  // A shard waits for this worker no longer.
  void Dropped() { dropped_ = true; }
  void Settled(Entry entry);
  // Its update may be applied: those of the rounds before are, and the newest round's values of the slice are in a
  // frame (what goes back to the residual must not meet an encoder there).
  bool MayApply(Entry entry) const;

  // After a break: the frames of `shard` to send again, oldest round first. What had arrived is not known here; the
  // shard knows it by the digests.
  std::vector<Entry> Unanswered(uint32_t shard) const;
  // Of each of its buckets as many times as rounds, from the oldest open one to the last of which this shard has
  // answered something; ascending.
  std::vector<uint32_t> SeenBuckets(uint32_t shard) const;
  // A frame is about to be sent again, after a break or to abstain. False: everything has come meanwhile. A shard that
  // forgot the frame may judge it anew; nothing is decoded before Sent, for its bytes are in use.
  bool SendAgain(Entry entry);

  bool open() const { return !rounds_.empty(); }
  // The oldest open one, or the one that opens next.
  uint64_t round() const { return round_; }
  uint64_t next() const { return round_ + rounds_.size(); }  // the round that opens next
  // The version that every slice has: the oldest open round that is not settled.
  uint64_t version() const;
  bool IsOpen(uint64_t round) const { return round >= round_ && round - round_ < rounds_.size(); }
  // Of the round.
  bool abstained(Entry entry) const { return At(entry).abstained; }
  bool included(Entry entry) const { return At(entry).included; }
  bool update_gone(Entry entry) const { return At(entry).update_gone; }
  bool parameters_gone(Entry entry) const { return At(entry).parameters_gone; }
  // Going on with the next round is in vain: what it needs is gone, or the shards are past it.
  bool Behind() const { return dropped_ || latest_ > next() || AnyGone(); }
  // Of the rounds that were open since MoveTo.
  bool AnyGone() const { return gone_; }
  bool AllSettled() const { return version() == next(); }  // every open one
  bool AllAcked() const;                                   // of every open one
  bool AllSettled(uint64_t round) const { return Of(round).settled == slices_; }
  bool AllSent(uint64_t round) const { return !IsOpen(round) || Of(round).sent == slices_; }  // also when it is over
  uint32_t settled(uint64_t round) const { return IsOpen(round) ? Of(round).settled : slices_; }
  // Every slice of the job's bucket, in every open round.
  bool BucketAcked(uint32_t job_bucket) const;
  bool BucketSettled(uint32_t job_bucket) const;

 private:
  struct Slice {
    bool abstained = false;  // an abstaining frame is sent, instead of or after a refused one
    bool sent = false;
    bool acked = false;
    bool included = false;
    bool update_missing = false;
    bool parameters_missing = false;
    bool update_gone = false;
    bool parameters_gone = false;
    bool complete = false;  // handed over for decoding
    bool settled = false;
  };
  struct Round {
    std::vector<Slice> slices;
    uint32_t sent = 0;
    uint32_t settled = 0;
  };

  const Round& Of(uint64_t round) const { return rounds_[round - round_]; }
  const Slice& At(Entry entry) const { return Of(entry.round).slices[entry.slice]; }
  Slice& At(Entry entry) { return rounds_[entry.round - round_].slices[entry.slice]; }
  // What an answer of this kind ends; null: it is not missed.
  bool* Missing(Entry entry, v1::PullKind kind);
  template <typename F>
  bool EveryOf(uint32_t job_bucket, F is) const;
  void SetSent(Entry entry, bool sent);
  void CompleteIfDone(Entry entry, Actions* actions);

  const Rules rules_;
  const uint32_t slices_;
  uint64_t round_;
  std::vector<Round> rounds_;  // from round_ on
  uint64_t latest_ = 0;        // round that was heard of
  bool dropped_ = false;
  bool gone_ = false;  // something, since MoveTo
};

}  // namespace gradwire::client

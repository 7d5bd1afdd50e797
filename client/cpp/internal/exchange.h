// The rounds of one worker: tensors get ready, buckets are encoded and sent, updates arrive and are applied.
//
//   TensorReady -> [encoding threads: ingest, select; encode, send, ask for the update] -> shard
//   shard -> ack, update frame -> [applying thread: decode; apply after EndRound, or early; settle]
//
// A small job in host memory has no threads: waking one costs more than its work. TensorReady encodes, EndRound
// applies.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/include/gradwire/session.h"
#include "client/cpp/internal/frame_link.h"
#include "client/cpp/internal/round_ledger.h"
#include "client/cpp/internal/slice_work.h"
#include "client/cpp/internal/tasked_exchanger.h"
#include "common/base/spin_budget.h"
#include "common/codec/codec.h"
#include "common/job/layout.h"

namespace gradwire::client {

// Borrowed; outlives the exchange.
struct ExchangeContext {
  SliceContext slices;
  std::vector<FrameLink*> links;         // per shard
  int64_t spin_us = 0;                   // SessionOptions.spin_us
  uint32_t encode_threads = 1;           // SessionOptions.encode_threads
  bool early_updates = false;            // SessionOptions.early_updates
  Coalescing coalescing = Coalescing();  // where it begins
};

// One step of a worker's round.
struct ExchangeTask {
  enum class Kind { kIngest, kAgain, kEncode, kReplace, kAbstain, kAsk, kResend };
  Kind kind = Kind::kIngest;
  uint32_t index = 0;        // kIngest, kAgain: tensor; kResend: shard
  GivenGradient gradient;    // kIngest
  RoundLedger::Entry entry;  // the others; of kIngest and kAgain its round
};

// Thread-safety as Session says. Owns the encoding threads and one that applies, from construction to Stop, or none
// (see kThreadsAbove). Memory in flight: the frames of the open rounds (chunks are kept until they are settled, never
// encoded again) and their update frames.
class Exchange final : public TaskedExchanger<ExchangeTask> {
 public:
  // `version`: of the parameters in the replica; `plans`: up to that version, per slice.
  Exchange(const ExchangeContext& context, uint64_t version, std::vector<PlanWindow> plans);
  ~Exchange() override;

  absl::Status Begin(std::span<const float> learning_rates) override;
  absl::Status BeginReplacement() override;
  absl::Status End(int64_t timeout_ms) override;
  absl::Status Drain(int64_t timeout_ms) override;
  absl::Status WaitPushed(uint32_t bucket, int64_t timeout_ms) override;
  absl::Status WaitApplied(uint32_t bucket, int64_t timeout_ms) override;

  // Ends the exchange for good: later calls return `reason`. No memory of the caller is touched after it returned.
  void Stop(const absl::Status& reason) override;

  uint64_t version() const override;
  absl::StatusOr<std::vector<PlanWindow>> Plans() const override;

  void OnAck(uint32_t shard, const v1::PushAck& ack) override;
  void OnAnswer(uint32_t shard, PullAnswer answer) override;
  void OnMustInitialize(uint32_t shard) override {}
  std::optional<ResumePoint> ResumeAt(uint32_t shard) override;
  void OnResumed(uint32_t shard, bool behind) override;
  void OnLost(uint32_t shard, const absl::Status& status) override;

 private:
  using Entry = RoundLedger::Entry;
  using Task = ExchangeTask;
  // What is pulled to catch up: of every slice the versions from `first` to `last`.
  struct Catching {
    v1::PullKind kind = v1::PULL_UNSPECIFIED;
    uint64_t first = 0;
    uint64_t last = 0;
    std::vector<std::vector<wire::Chunk>> chunks;  // [(version - first) * slices + slice]
    size_t missing = 0;
    bool gone = false;
    uint64_t resumed = 0;  // links that had been mended when it was asked for: it is lost with a later break
  };

  absl::Status CheckMayBegin() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void OpenRound() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // A round without values is over: the same gradients travel again, in the next one.
  absl::Status StartAgain();
  // The open rounds are settled, the shards are ahead: goes on with their next one. What cannot be caught up by update
  // frames is by parameters. DeadlineExceeded: call again.
  absl::Status CatchUp(absl::Time deadline);
  // Sets out to be at `version`: asks the shards for what that takes.
  void AskFor(uint64_t version, uint64_t resumed, bool* by_updates);
  // Waits for what was asked for, and takes it. False: ask again, `by_updates` says how. DeadlineExceeded: it stays
  // asked for.
  absl::StatusOr<bool> WaitForCaught(bool* by_updates, absl::Time deadline);
  absl::Status TakeCaught();
  void NoteCaught(uint32_t shard, PullAnswer answer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The worker may go on with the next round; what is here of later versions is applied.
  bool MayGoOn() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // It has parameters, and may catch up with the others. Who pulls means has those that are kept, and no others.
  bool Follows() const { return context_.slices.pull != PullMode::kMean; }
  bool Carried() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);  // the newest round did carry values
  bool AllApplied() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Waits for `done` while updates are applied, then for none to be, and closes the rounds that are settled.
  absl::Status ApplyUntil(const absl::Condition& done, absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status FinishStep(TimeNs begin) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Waits for `done` or failure, which is Failed.
  absl::Status WaitUntil(const absl::Condition& done, absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Why it did, once no thread of ours uses the caller's memory any more.
  absl::Status Failed() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Awaits `done`; without threads receives on this one meanwhile, if such waits are short. False: not in time.
  bool WaitFor(const absl::Condition& done, absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Receives on this thread until `done` or for about budget_ns. Releases the lock meanwhile.
  void PollFor(TimeNs budget_ns, const absl::Condition& done) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status AwaitBucket(uint32_t bucket, bool (RoundLedger::*done)(uint32_t) const, int64_t timeout_ms);

  absl::Status Failure() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Task TaskOf(uint32_t tensor, const GivenGradient& gradient) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Work(const Task& task) override ABSL_LOCKS_EXCLUDED(mu_);
  TaskPlace PlaceOf(const Task& task) const override;
  void ProcessTensor(const Task& task);
  void EncodeSlice(Entry entry);
  void SendAbstain(Entry entry);
  void AskForUpdate(Entry entry);
  void SendReplacement(Entry entry);
  // The same bytes again for every frame of `shard` whose acknowledgement or update is missing: the shard knows by
  // digest what it had merged, and answers with what is missing here.
  void Resend(uint32_t shard);
  // The frame with values or, once it was refused, one that abstains; unless the slice has all it needs meanwhile.
  void SendAgain(Entry entry);
  void Send(Entry entry, std::vector<Bytes> chunks);

  void ApplyLoop();
  // The next entry that may be applied, decoded_.end() if none.
  std::deque<Entry>::const_iterator Applicable() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The caller's memory.
  bool MayWrite() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return apply_allowed_ && failed_.ok(); }
  bool CanApply() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return !undecoded_.empty() || (MayWrite() && Applicable() != decoded_.end());
  }
  // Decodes the next slice that has come, and applies it where that may be; else applies the next that is decoded.
  // Releases the lock while it works.
  void ApplyNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  void NoteAck(uint32_t shard, const v1::PushAck& ack) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void NoteAnswer(uint32_t shard, PullAnswer answer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Does what the ledger decided, or puts it into the queues.
  void Run(const RoundLedger::Actions& actions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  SliceBytes& BytesOf(Entry entry) { return bytes_[entry.round % (staleness_ + 1) * work_.slices() + entry.slice]; }

  const ExchangeContext context_;
  const uint64_t staleness_;

  // One slice is used by one thread at a time, handed over through the ledger and the queues.
  SliceWork work_;
  std::vector<SliceBytes> bytes_;  // of the open rounds, see BytesOf

  bool replacing_ ABSL_GUARDED_BY(mu_) = false;        // the newest round replaces parameters
  uint64_t gradients_round_ ABSL_GUARDED_BY(mu_) = 0;  // the first one in which the step's gradients travel
  bool apply_allowed_ ABSL_GUARDED_BY(mu_) = false;
  int polling_ ABSL_GUARDED_BY(mu_) = 0;  // callers that use the links to receive
  bool writing_replica_ ABSL_GUARDED_BY(mu_) = false;
  bool agreeing_ ABSL_GUARDED_BY(mu_) = false;  // a caller asks the shards where to go on, by their links
  RoundLedger ledger_ ABSL_GUARDED_BY(mu_);
  std::deque<Entry> undecoded_ ABSL_GUARDED_BY(mu_);
  std::deque<Entry> decoded_ ABSL_GUARDED_BY(mu_);
  std::optional<Catching> catching_ ABSL_GUARDED_BY(mu_);
  uint64_t resumed_ ABSL_GUARDED_BY(mu_) = 0;  // times that a shard has got new streams
  SpinBudget spin_ ABSL_GUARDED_BY(mu_);

  std::thread apply_thread_;
};

}  // namespace gradwire::client

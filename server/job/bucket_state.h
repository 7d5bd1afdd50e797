// What a shard keeps per bucket: the rounds that are being merged, the parameters, and the answers for pullers.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/codec/codec.h"
#include "common/codec/frame/frame_assembler.h"
#include "common/codec/plan/plan_window.h"
#include "common/journal/record.h"
#include "gradwire/v1/worker.pb.h"
#include "server/job/memory_account.h"
#include "server/job/outbox.h"
#include "server/job/parameter_store.h"
#include "server/rounds/membership.h"
#include "server/snapshot/shard_capture.h"

namespace gradwire {

// The chunks of one answer; shared by every puller of it.
using SharedChunks = std::shared_ptr<const std::vector<Bytes>>;

// A pull that waits for its version.
struct Waiter {
  MemberId member = 0;
  std::shared_ptr<Outbox> out;
  v1::PullKind kind = v1::PULL_UNSPECIFIED;
  uint64_t version = 0;  // asynchronous rounds: or any later one
  // The round of the frame that it was asked for with: answered as PushAck, else as PullMessage.
  std::optional<uint64_t> pushed = {};
  // Parameters of a version that is there and may not be seen yet: the bucket may go on before it may.
  SharedChunks prepared = nullptr;
  uint64_t prepared_version = 0;
};

// An answer that is ready to be sent, once no lock is held.
struct Delivery {
  Waiter to;
  uint32_t bucket = 0;
  absl::Status status;  // not OK: sent instead of chunks
  SharedChunks chunks;
  // Else acknowledges the frame that it was asked for with.
  v1::PushOutcome outcome = v1::PUSH_OUTCOME_UNSPECIFIED;
  uint64_t open_round = 0;  // as in PushAck
  uint64_t made = 0;        // the same
};

struct RetainedUpdate {
  SharedChunks chunks;
  bool is_owed = false;                    // it says what its workers return to their residuals: see OwedUpdates
  bool skipped = false;                    // the round was
  std::vector<journal::Contribution> who;  // took part; of durable jobs
  MemoryAccount::Share share = {};         // of one that replaces parameters, which the job's bound does not cover
};

// What the parameters of a bucket become with the round.
struct Replacement {
  std::vector<float> values;
  std::string worker;  // that sent them first
  MemoryAccount::Share share;
};

// A frame whose last chunk has not come yet.
struct PartialFrame {
  std::unique_ptr<FrameAssembler> assembler;  // of a frame that is merged as it comes
  std::vector<std::vector<Bytes>> held;       // asynchronous rounds: its chunks so far, as they were received
  std::vector<Bytes> parameters;              // of a frame that replaces them: its chunks so far
  const void* stream = nullptr;               // the stream that it comes from
  uint64_t held_bytes = 0;                    // counted into the job's bytes in flight
};

// A round that frames are merged into.
struct OpenRound {
  static constexpr uint64_t kNone = UINT64_MAX;

  uint64_t round = kNone;  // none: its plan is not known yet
  std::unique_ptr<Accumulator> accumulator;
  uint32_t committed = 0;             // complete frames in the accumulator
  std::vector<float> learning_rates;  // of the member that has been here for longest of those whose frames are complete
  MemberId rates_of = 0;              // with a quorum: of the first of them
  bool nonfinite = false;             // a worker abstains because its gradient is not finite
  std::optional<Replacement> replacement;  // nobody contributes: workers replace the parameters
  std::map<MemberId, PartialFrame> partial;
};

// Lock order: BucketState::mu before JobShard::mu_. Nothing is sent and no I/O is done while mu is held.
struct BucketState {
  const BucketLayout* layout = nullptr;
  std::unique_ptr<Codec> codec;

  absl::Mutex mu;
  std::unique_ptr<ParameterStore> store ABSL_GUARDED_BY(mu);
  bool ready ABSL_GUARDED_BY(mu) = false;    // the initial parameters are complete
  uint64_t version ABSL_GUARDED_BY(mu) = 0;  // of the parameters, and the oldest round that is being merged
  // Versions up to this one may be seen: their records meet the job's durability. Without a journal all may.
  uint64_t durable ABSL_GUARDED_BY(mu) = UINT64_MAX;
  // That has the copy of a version which is not durable yet.
  std::shared_ptr<ShardCapture> copied ABSL_GUARDED_BY(mu);
  uint64_t handed ABSL_GUARDED_BY(mu) =
      0;  // the newest version whose record the sink has been given, or is about to be
  std::shared_ptr<ShardCapture> capture ABSL_GUARDED_BY(mu);  // wants this bucket at its version; may be null
  absl::Status failure ABSL_GUARDED_BY(mu);                   // our own bug stopped this bucket

  PlanWindow plans ABSL_GUARDED_BY(mu);  // up to that of `version`
  // Round r is at r modulo the number of rounds that may be open (OpenRounds). Asynchronous rounds have one place:
  // none, or the round of a frame that was merged, until the version that it makes is there.
  std::vector<OpenRound> open ABSL_GUARDED_BY(mu);
  // Null: it is over, or not open yet.
  OpenRound* Find(uint64_t round) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    OpenRound& at = open[round % open.size()];
    return at.round == round ? &at : nullptr;
  }

  // What kind of update workers that are away are still owed, see OwedUpdates.
  bool IsOwed(bool skipped, bool replaces) const { return skipped || (codec->defers() && !replaces); }

  // The upload of initial parameters.
  MemberId initializer ABSL_GUARDED_BY(mu) = 0;
  const void* initializing_stream ABSL_GUARDED_BY(mu) = nullptr;
  std::vector<Bytes> initial_chunks ABSL_GUARDED_BY(mu);
  uint32_t initial_digest ABSL_GUARDED_BY(mu) = 0;       // ExtendDigest over its chunks so far
  uint32_t unwritten_initials ABSL_GUARDED_BY(mu) = 0;   // whole ones whose records may not be seen yet
  std::shared_ptr<Outbox> uploader ABSL_GUARDED_BY(mu);  // is told when they may; null: nobody waits

  // The retained update frames, at most RetainedUpdates; the last one made `version`.
  std::deque<RetainedUpdate> updates ABSL_GUARDED_BY(mu);
  std::map<uint64_t, SharedChunks> owed ABSL_GUARDED_BY(mu);  // by version, at most OwedUpdates
  uint64_t owed_from ABSL_GUARDED_BY(mu) = 0;                 // an older version may have been given up
  Traffic traffic ABSL_GUARDED_BY(mu);                        // of the round that made `version`
  // Parameters serialized at `version` for the kind that was asked for last.
  v1::PullKind serialized_kind ABSL_GUARDED_BY(mu) = v1::PULL_UNSPECIFIED;
  SharedChunks serialized ABSL_GUARDED_BY(mu);
  std::vector<Waiter> waiting ABSL_GUARDED_BY(mu);  // at most MaxWaitersPerMember each
};

}  // namespace gradwire

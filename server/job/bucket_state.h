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
#include "server/desk/delivery.h"
#include "server/desk/outbox.h"
#include "server/job/memory_account.h"
#include "server/job/parameter_store.h"
#include "server/rounds/membership.h"
#include "server/snapshot/shard_capture.h"

namespace gradwire {

struct RetainedUpdate {
  SharedFrame frame;
  bool is_owed = false;  // its workers need it to know what they return to their residuals: OwedUpdates
  bool skipped = false;  // the round was skipped
  std::vector<journal::Contribution> who;  // took part; in durable jobs
  MemoryAccount::Share share = {};         // for an update that replaces parameters: the job's bound does not cover it
};

// What the parameters of a bucket become with a round that replaces them.
struct Replacement {
  std::vector<float> values;
  std::string worker;  // who sent the values first
  MemoryAccount::Share share;
};

// A frame whose last chunk has not come yet.
struct PartialFrame {
  std::unique_ptr<FrameAssembler> assembler;  // of a frame that is merged as it comes
  std::vector<std::vector<Bytes>> chunks;     // asynchronous rounds: its chunks so far, as they were received
  std::vector<Bytes> parameters;              // of a frame that replaces the parameters: its chunks so far
  uint64_t stream = 0;                        // the number of the stream that it comes from
  bool replaces = false;                      // it carries parameters
  uint64_t held_bytes = 0;                    // counted into the job's bytes in flight
};

// The upload of a bucket's initial parameters (InitialUpload).
struct Upload {
  MemberId worker = 0;           // whose parameters are here
  uint64_t stream = 0;           // the number of that which the kept chunks come from; 0: none are kept
  MemberId from = 0;             // whose stream that is
  std::vector<Bytes> chunks;     // so far
  uint32_t digest = 0;           // ExtendDigest over the chunks
  uint32_t unsafe = 0;           // whole uploads whose records may not be seen yet
  std::shared_ptr<Outbox> asks;  // is told when the records may be seen; null: nobody waits
};

// A round that frames are merged into.
struct OpenRound {
  static constexpr uint64_t kNone = UINT64_MAX;

  uint64_t round = kNone;  // kNone: no round, for the plan of the next is not known yet
  std::unique_ptr<Accumulator> accumulator;
  uint32_t committed = 0;             // complete frames in the accumulator
  std::vector<float> learning_rates;  // of the oldest member whose frame is complete; with a quorum, of the first frame
  MemberId rates_of = 0;              // whose frame set them
  bool nonfinite = false;             // a worker abstains because its gradient is not finite
  std::optional<Replacement> replacement;  // nobody contributes: workers replace the parameters
  std::map<MemberId, PartialFrame> partial;
};

// The order of locks: JobParts.
struct BucketState {
  const BucketLayout* layout = nullptr;
  std::unique_ptr<Codec> codec;

  absl::Mutex mu;
  std::unique_ptr<ParameterStore> store ABSL_GUARDED_BY(mu);
  bool ready ABSL_GUARDED_BY(mu) = false;    // the initial parameters are complete, or a later state is here
  uint64_t version ABSL_GUARDED_BY(mu) = 0;  // of the parameters, and the oldest round that is being merged
  // Versions up to this one may be seen: their records meet the job's durability. Without a journal all may.
  uint64_t durable ABSL_GUARDED_BY(mu) = UINT64_MAX;
  // The capture that has a copy of this bucket at a version which is not durable yet; may be null.
  std::shared_ptr<ShardCapture> copied ABSL_GUARDED_BY(mu);
  uint64_t handed ABSL_GUARDED_BY(mu) =
      0;  // the newest version whose record the sink has been given, or is about to be
  std::shared_ptr<ShardCapture> capture ABSL_GUARDED_BY(mu);  // wants this bucket at its version; may be null
  absl::Status failure ABSL_GUARDED_BY(mu);                   // our own bug stopped this bucket

  PlanWindow plans ABSL_GUARDED_BY(mu);  // up to that of `version`
  // Round r is at r modulo the number of rounds that may be open (OpenRounds). Asynchronous rounds have one place:
  // none, or the round of a frame that was merged, until the version that it makes is there.
  std::vector<OpenRound> open ABSL_GUARDED_BY(mu);
  // The round `round`. Null: it is over, or not open yet.
  OpenRound* Find(uint64_t round) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    OpenRound& at = open[round % open.size()];
    return at.round == round ? &at : nullptr;
  }

  Upload upload ABSL_GUARDED_BY(mu);

  // The retained update frames, at most RetainedUpdates; the last one made `version`.
  std::deque<RetainedUpdate> updates ABSL_GUARDED_BY(mu);
  std::map<uint64_t, SharedFrame> owed ABSL_GUARDED_BY(mu);  // by version, at most OwedUpdates
  uint64_t owed_from ABSL_GUARDED_BY(mu) = 0;                // updates of older versions may have been given up
  Traffic traffic ABSL_GUARDED_BY(mu);                       // of the round that made `version`
  // Parameters serialized at `version` for the kind that was asked for last.
  v1::PullKind serialized_kind ABSL_GUARDED_BY(mu) = v1::PULL_UNSPECIFIED;
  SharedFrame serialized ABSL_GUARDED_BY(mu);
  // The update of the version that was last pulled without its body.
  uint64_t plan_only_version ABSL_GUARDED_BY(mu) = 0;
  SharedFrame plan_only ABSL_GUARDED_BY(mu);
  std::vector<Waiter> waiting ABSL_GUARDED_BY(mu);  // at most MaxWaitersPerMember each

  // The retained update that `round` made; null: it is not there.
  const RetainedUpdate* UpdateOf(uint64_t round) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    const uint64_t age = version - 1 - round;
    return version <= round || age >= updates.size() ? nullptr : &updates[updates.size() - 1 - age];
  }
};

}  // namespace gradwire

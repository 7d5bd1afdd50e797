// What a worker computes for one slice in one round: gradient -> frame; update frame -> replica, and what the frame did
// not bring back to the residual. No threads, locks or I/O; who sends, and when, is the owner's (Exchange).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/include/gradwire/session.h"
#include "client/cpp/internal/gradients.h"
#include "client/cpp/internal/replica.h"
#include "common/base/bytes.h"
#include "common/codec/codec.h"
#include "common/codec/plan/plan_window.h"
#include "common/codec/update/update.h"
#include "common/job/layout.h"
#include "common/job/norms.h"
#include "common/trace/recorder.h"
#include "gradwire/v1/worker.pb.h"

namespace gradwire::client {

// Borrowed; outlives the work.
struct SliceContext {
  const Job* job = nullptr;
  const Layout* layout = nullptr;
  PullMode pull = PullMode::kUpdate;
  uint64_t incarnation = 0;
  std::vector<const Codec*> codecs;  // of Layout::slices()
  Replica* replica = nullptr;
  GradientStore* gradients = nullptr;
  uint64_t draws = 0;              // FrameIdentity::draws
  TraceRecorder* trace = nullptr;  // may be null: nothing is noted
};

// The bytes of one (round, slice): frames are kept until they are settled, never encoded again.
struct SliceBytes {
  std::optional<EncodedFrame> frame;
  std::vector<wire::Chunk> update_chunks;
  std::vector<wire::Chunk> parameter_chunks;
  Update update;           // once decoded
  bool nonfinite = false;  // no frame: the gradient is not finite, and the job skips such rounds
  bool skipped = false;    // once applied: the round was
  // In the place of a frame: what replaces the parameters.
  std::optional<std::vector<Bytes>> replacement;
  // What the shard has no longer.
  bool update_gone = false;
  bool parameters_gone = false;
};

// Not thread-safe for one slice; different slices may be worked on at once. `slice`: index into Layout::slices().
class SliceWork {
 public:
  // `plans`: up to the version in the replica, per slice.
  SliceWork(const SliceContext& context, std::vector<PlanWindow> plans);

  uint32_t slices() const { return static_cast<uint32_t>(states_.size()); }
  const BucketLayout& LayoutOf(uint32_t slice) const { return context_.layout->slices()[slice]; }
  const PlanWindow& plans(uint32_t slice) const { return states_[slice].plans; }  // up to the slice's version
  // What is wanted of its update frames. Nothing: unspecified. A worker that pulls parameters still reads those of
  // codecs that defer, which name the elements; one that wants no mean of the slice leaves out the body.
  v1::PullKind UpdateKind(uint32_t slice) const;
  // Rounds with gradients that are not finite, in this job.
  bool skips() const { return SkipsNonFinite(*context_.job); }
  // Unspecified: it pulls none.
  v1::PullKind ParametersKind() const;

  // Errors: those of Encoder::Encode; the slice abstains then, and its values are kept.
  absl::Status Encode(uint32_t slice, uint64_t round, std::span<const float> learning_rates, SliceBytes* bytes);
  // A frame that contributes nothing; `nonfinite`: and asks for the round to be skipped. May run beside Apply.
  std::vector<Bytes> EncodeAbstain(uint32_t slice, uint64_t round, bool nonfinite) const;
  // InvalidArgument: a parameter of the replica, named, is not finite.
  absl::Status CheckParametersFinite() const;
  // The frame by which the job's parameters become those of the replica.
  std::vector<Bytes> EncodeReplacement(uint32_t slice, uint64_t round) const;
  absl::Status Decode(uint32_t slice, uint64_t round, SliceBytes* bytes) const;
  // Steps the replica, and takes back what the frame did not bring. After Decode, and after the round before. Where the
  // update, or one before it, is gone the replica stays, and nobody knows what a frame that is in it has deferred:
  // DataLoss if its codec may defer. Where the round was skipped, the residual is what it was before.
  // FailedPrecondition: this worker replaced parameters, which the round did not take.
  absl::Status Apply(uint32_t slice, uint64_t round, bool included, SliceBytes* bytes);
  // The update frame of a round in which this worker has no part.
  absl::Status Follow(uint32_t slice, uint64_t round, std::span<const wire::Chunk> chunks);
  // What a shard has at `version`: parameters, moments where the replica has them, and the plans.
  absl::Status Load(uint32_t slice, uint64_t version, std::span<const wire::Chunk> chunks);
  // What the tensors of the slice hold of the open round waits in the residual: no frame carries it.
  void Keep(uint32_t slice) { context_.gradients->Keep(LayoutOf(slice)); }

 private:
  struct State {
    Encoder* encoder = nullptr;
    bool wanted = true;  // means of it go into the caller's memory
    PlanWindow plans;
  };

  TraceSpan Span(v1::TraceStage stage, uint32_t slice, uint64_t round) const {
    const BucketLayout& layout = LayoutOf(slice);
    return {context_.trace, {.stage = stage, .round = round, .bucket = layout.bucket, .shard = layout.shard}};
  }
  const RoundPlan& PlanOf(uint32_t slice, uint64_t round) const {
    return *states_[slice].plans.OfRound(*context_.job, round);
  }
  absl::Status Settle(uint32_t slice, uint64_t round, bool included, const SliceBytes& bytes);

  const SliceContext context_;
  std::vector<State> states_;
};

}  // namespace gradwire::client

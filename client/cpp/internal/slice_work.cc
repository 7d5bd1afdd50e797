// See slice_work.h.
#include "client/cpp/internal/slice_work.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/failpoint.h"
#include "common/base/status_macros.h"
#include "common/codec/family.h"
#include "common/codec/frame/parameters.h"
#include "common/job/round_mode.h"
#include "common/wire/frame.h"

namespace gradwire::client {

SliceWork::SliceWork(const SliceContext& context, std::vector<PlanWindow> plans)
    : context_(context), states_(plans.size()) {
  for (uint32_t i = 0; i < states_.size(); ++i) {
    states_[i].encoder = context_.gradients->EncoderOf(*context_.codecs[i]);
    // Factors are the plan of the next round: without its body their update frame is the same.
    const BucketLayout& layout = LayoutOf(i);
    states_[i].wanted =
        context_.replica->Wants(layout) || FamilyOf(*context_.job, layout).MostFactors(*context_.job, layout) != 0;
    states_[i].plans = std::move(plans[i]);
  }
}

v1::PullKind SliceWork::ParametersKind() const {
  if (context_.pull == PullMode::kParams) return v1::PULL_PARAMS_F32;
  return context_.pull == PullMode::kParamsBf16 ? v1::PULL_PARAMS_BF16 : v1::PULL_UNSPECIFIED;
}

v1::PullKind SliceWork::UpdateKind(uint32_t slice) const {
  if (!states_[slice].wanted) return v1::PULL_PLAN;
  const bool needed = ParametersKind() == v1::PULL_UNSPECIFIED || context_.codecs[slice]->defers();
  return needed ? v1::PULL_UPDATE : v1::PULL_UNSPECIFIED;
}

absl::Status SliceWork::Encode(uint32_t slice, uint64_t round, std::span<const float> learning_rates,
                               SliceBytes* bytes) {
  const TraceSpan span = Span(v1::TRACE_ENCODE, slice, round);
  FrameIdentity id;
  id.shard = static_cast<uint16_t>(LayoutOf(slice).shard);
  id.bucket = LayoutOf(slice).bucket;
  id.round = round;
  id.incarnation = context_.incarnation;
  id.learning_rates = learning_rates;
  id.draws = context_.draws;
  GW_ASSIGN_OR_RETURN(bytes->frame,
                      context_.gradients->Encode(id, PlanOf(slice, round), LayoutOf(slice), states_[slice].encoder));
  if (CarriesValues(*context_.job, round)) context_.gradients->Encoded(LayoutOf(slice));
  return absl::OkStatus();
}

std::vector<Bytes> SliceWork::EncodeAbstain(uint32_t slice, uint64_t round, bool nonfinite) const {
  wire::FrameHeader header;
  header.kind = wire::FrameKind::kPush;
  header.flags = static_cast<uint16_t>(wire::kAbstain | (nonfinite ? wire::kNonFinite : 0));
  header.bucket = LayoutOf(slice).bucket;
  header.shard = static_cast<uint16_t>(LayoutOf(slice).shard);
  header.round = round;
  header.shape_digest = LayoutOf(slice).shape_digest;
  header.incarnation = context_.incarnation;
  return wire::FrameWriter(header).Finish();
}

absl::Status SliceWork::CheckParametersFinite() const {
  const std::vector<Tensor>& tensors = context_.job->tensors();
  for (uint32_t t = 0; t < tensors.size(); ++t) {
    const std::span<const float> values = context_.replica->parameter(t);
    const int64_t first = context_.replica->memory().FindNonFinite(values);
    if (first < 0) continue;
    return absl::InvalidArgumentError(absl::StrCat("tensor '", tensors[t].name, "', element ", first, ": parameter ",
                                                   values[static_cast<size_t>(first)], " is not finite"));
  }
  return absl::OkStatus();
}

std::vector<Bytes> SliceWork::EncodeReplacement(uint32_t slice, uint64_t round) const {
  const BucketLayout& layout = LayoutOf(slice);
  return gradwire::EncodeReplacement(layout, round, context_.incarnation, context_.replica->Gather(layout).data());
}

absl::Status SliceWork::Decode(uint32_t slice, uint64_t round, SliceBytes* bytes) const {
  if (bytes->update_chunks.empty()) return absl::OkStatus();  // not needed, or gone
  const TraceSpan span = Span(v1::TRACE_DECODE, slice, round);
  const BucketLayout& layout = LayoutOf(slice);
  const RoundPlan& plan = PlanOf(slice, round);
  GW_ASSIGN_OR_RETURN(bytes->update, states_[slice].wanted
                                         ? DecodeUpdate(bytes->update_chunks, *context_.job, layout, plan)
                                         : DecodePlan(bytes->update_chunks, *context_.job, layout, plan));
  if (bytes->update.round != round)
    return absl::InvalidArgumentError(absl::StrCat("bucket ", LayoutOf(slice).bucket, ": an update frame of round ",
                                                   bytes->update.round, " came where round ", round, " was expected"));
  return absl::OkStatus();
}

absl::Status SliceWork::Apply(uint32_t slice, uint64_t round, bool included, SliceBytes* bytes) {
  const TraceSpan span = Span(v1::TRACE_STEP, slice, round);
  const BucketLayout& layout = LayoutOf(slice);
  bytes->skipped = bytes->update.skipped;
  const bool gone = ParametersKind() == v1::PULL_UNSPECIFIED ? bytes->update_gone : bytes->parameters_gone;
  if (gone || states_[slice].plans.version() != round) return Settle(slice, round, included, *bytes);
  std::optional<PlanWindow> loaded;
  switch (context_.pull) {
    case PullMode::kUpdate:
      GW_RETURN_IF_ERROR(context_.replica->Apply(layout, bytes->update));
      break;
    case PullMode::kMean:
      if (states_[slice].wanted && CarriesValues(*context_.job, round))
        GW_RETURN_IF_ERROR(context_.replica->WriteMean(layout, bytes->update));
      break;
    case PullMode::kParams:
    case PullMode::kParamsBf16: {
      GW_ASSIGN_OR_RETURN(loaded, context_.replica->Load(layout, bytes->parameter_chunks, round + 1));
      const bool no_step = loaded->nonfinite_rounds() > states_[slice].plans.nonfinite_rounds();
      bytes->skipped = skips() && no_step && !bytes->replacement;
      bytes->update.replaces = no_step && bytes->replacement;
      break;
    }
  }
  if (bytes->replacement && !bytes->update.replaces)
    return absl::FailedPreconditionError(absl::StrCat(
        "bucket ", LayoutOf(slice).bucket, ": round ", round,
        " did not replace the parameters, as this worker asked for: every worker must ask for it in the same step"));
  GW_FAILPOINT("worker.update.applied");
  GW_RETURN_IF_ERROR(Settle(slice, round, included, *bytes));
  if (loaded) {
    states_[slice].plans = *std::move(loaded);
  } else {
    states_[slice].plans.Push(std::move(bytes->update.next), bytes->skipped || bytes->update.replaces);
  }
  return absl::OkStatus();
}

absl::Status SliceWork::Follow(uint32_t slice, uint64_t round, std::span<const wire::Chunk> chunks) {
  GW_ASSIGN_OR_RETURN(Update update, DecodeUpdate(chunks, *context_.job, LayoutOf(slice), PlanOf(slice, round)));
  if (update.round != round)
    return absl::InvalidArgumentError(absl::StrCat("bucket ", LayoutOf(slice).bucket, ": an update frame of round ",
                                                   update.round, " came where round ", round, " was expected"));
  GW_RETURN_IF_ERROR(context_.replica->Apply(LayoutOf(slice), update));
  states_[slice].plans.Push(std::move(update.next), update.skipped || update.replaces);
  return absl::OkStatus();
}

absl::Status SliceWork::Load(uint32_t slice, uint64_t version, std::span<const wire::Chunk> chunks) {
  GW_ASSIGN_OR_RETURN(states_[slice].plans, context_.replica->Load(LayoutOf(slice), chunks, version));
  return absl::OkStatus();
}

absl::Status SliceWork::Settle(uint32_t slice, uint64_t round, bool included, const SliceBytes& bytes) {
  const BucketLayout& layout = LayoutOf(slice);
  // A worker that asked for it and does not know any more: its step is not taken, as its loop expects.
  const bool unknown = bytes.nonfinite && bytes.update_gone;
  if (bytes.skipped || unknown) {
    context_.gradients->Undo(layout);
    return absl::OkStatus();
  }
  if (bytes.nonfinite) Keep(slice);  // of its finite tensors: this came too late to skip the round
  if (!CarriesValues(*context_.job, round) || !bytes.frame) return absl::OkStatus();
  const Codec& codec = *context_.codecs[slice];
  if (!included) return context_.gradients->Returned(layout, codec, *bytes.frame);
  if (bytes.update_gone && codec.defers())
    return absl::DataLossError(absl::StrCat(
        "bucket ", LayoutOf(slice).bucket, ": the frame of round ", round,
        " was merged, but which of its elements were deferred is no longer known: this worker was away for "
        "too long"));
  return context_.gradients->Deferred(layout, codec, *bytes.frame, bytes.update.deferred);
}

}  // namespace gradwire::client

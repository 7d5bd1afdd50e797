// See update_compressor.h.
#include "common/codec/update/update_compressor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/hash.h"
#include "common/base/status_macros.h"
#include "common/codec/select/select.h"
#include "common/codec/update/update_body.h"
#include "common/job/update_codec.h"
#include "kernels/math/fixed_point.h"

namespace gradwire {
namespace {

// What stochastic codecs draw from on a shard, in the place of a worker's name.
constexpr char kDraws[] = "update";

// sum = residual + mean; residual may be null.
void AddMean(const BucketLayout& layout, const Update& mean, kernels::Backend& backend, const float* residual,
             float* sum) {
  std::vector<float> run_mean;
  for (uint32_t r = 0; r < layout.runs.size(); ++r) {
    const uint64_t begin = layout.run_begin[r];
    const size_t n = layout.runs[r].length;
    if (residual == nullptr) {
      mean.MeanOfRun(layout, r, sum + begin);
      continue;
    }
    run_mean.resize(std::max(run_mean.size(), n));
    mean.MeanOfRun(layout, r, run_mean.data());
    std::copy_n(residual + begin, n, sum + begin);
    backend.Add(sum + begin, run_mean.data(), n, nullptr);
  }
}

// Whether the residual changes where `mean` has elements, and nowhere else.
bool HasElementsOf(const Job& job, const BucketLayout& layout, const Update& mean) {
  return SendsElementsOfMean(job, layout.codec) &&
         (mean.body == Update::Body::kSparse || mean.body == Update::Body::kSparseFloat);
}

// residual + mean where the mean is not 0: what AddMean makes of these.
void AddMeanOf(const BucketLayout& layout, const Update& mean, const float* residual, Elements* sums) {
  const float contributors = static_cast<float>(mean.contributors);
  float unit = 0;
  sums->positions.reserve(mean.positions.size());
  sums->values.reserve(mean.positions.size());
  for (size_t k = 0, run = 0, of_unit = SIZE_MAX; k < mean.positions.size(); ++k) {
    const uint32_t position = mean.positions[k];
    float value;
    if (mean.body == Update::Body::kSparse) {
      while (position >= layout.run_begin[run + 1]) ++run;
      if (std::exchange(of_unit, run) != run) unit = std::ldexp(1.0f, mean.exponents[run]);
      value = kernels::MeanOfInteger(mean.integers[k], unit, contributors);
    } else {
      value = mean.values[k];
    }
    if (value == 0) continue;
    sums->positions.push_back(position);
    sums->values.push_back(residual[position] + value);
  }
}

// What was sent no longer waits. Internal: the update has other elements.
absl::Status Subtract(const Update& update, Elements* sums) {
  if (update.positions != sums->positions) {
    return absl::InternalError("an update by `union` whose elements are not those of its mean");
  }
  for (size_t k = 0; k < sums->values.size(); ++k) sums->values[k] -= update.values[k];
  return absl::OkStatus();
}

// The segments of `mean` with the body of `encoded` in the place of its own. Internal: `mean` has no body.
absl::StatusOr<std::vector<Bytes>> ReplaceBody(std::span<const wire::Chunk> mean,
                                               std::span<const wire::Chunk> encoded) {
  wire::FrameWriter writer(mean[0].header);
  const auto add_body = [&] {
    for (const wire::Chunk& chunk : encoded) {
      for (const wire::Segment& s : chunk.segments) {
        if (IsUpdateBody(s.type)) writer.Add(s, s.data);
      }
    }
  };
  bool added = false;
  for (const wire::Chunk& chunk : mean) {
    for (const wire::Segment& s : chunk.segments) {
      if (!IsUpdateBody(s.type)) {
        writer.Add(s, s.data);
      } else if (!std::exchange(added, true)) {
        add_body();
      }
    }
  }
  if (!added) return absl::InternalError("a mean without a segment that IsUpdateBody knows");
  return writer.Finish();
}

}  // namespace

absl::StatusOr<std::unique_ptr<UpdateCompressor>> UpdateCompressor::Make(const CodecContext& context) {
  const std::optional<CodecSpec>& spec = context.job->update_codecs()[context.layout->codec];
  if (!spec) return nullptr;
  std::unique_ptr<UpdateCompressor> compressor(new UpdateCompressor(context));
  CodecContext of_update = context;
  of_update.update = true;
  GW_ASSIGN_OR_RETURN(compressor->codec_, MakeCodec(of_update, *spec));
  compressor->encoder_ = compressor->codec_->NewEncoder();
  return compressor;
}

absl::Status UpdateCompressor::Compress(const RoundPlan& plan, const float* residual, ResidualChange* change,
                                        UpdateFrame* update) {
  change->Clear();
  GW_ASSIGN_OR_RETURN(const Update mean, DecodeMean(update->chunks, *context_.job, *context_.layout, plan));
  if (mean.body == Update::Body::kEmpty || mean.replaces) return absl::OkStatus();
  GW_ASSIGN_OR_RETURN(const EncodedFrame encoded, Encode(mean, residual, change));
  GW_ASSIGN_OR_RETURN(const std::vector<wire::Chunk> encoded_chunks, wire::ParseFrame(encoded.chunks));
  GW_ASSIGN_OR_RETURN(const std::vector<wire::Chunk> mean_chunks, wire::ParseFrame(update->chunks));
  GW_ASSIGN_OR_RETURN(std::vector<Bytes> replaced, ReplaceBody(mean_chunks, encoded_chunks));
  GW_ASSIGN_OR_RETURN(Update decoded, DecodeUpdate(replaced, *context_.job, *context_.layout, plan));
  if (HasElementsOf(*context_.job, *context_.layout, mean)) GW_RETURN_IF_ERROR(Subtract(decoded, change->Some()));
  update->mean = std::exchange(update->chunks, std::move(replaced));
  update->decoded = std::make_shared<const Update>(std::move(decoded));
  return absl::OkStatus();
}

absl::StatusOr<EncodedFrame> UpdateCompressor::Encode(const Update& mean, const float* residual,
                                                      ResidualChange* change) {
  const BucketLayout& layout = *context_.layout;
  FrameIdentity id;
  id.shard = static_cast<uint16_t>(layout.shard);
  id.bucket = layout.bucket;
  id.round = mean.round;
  id.learning_rates = mean.learning_rates;
  id.draws = HashString(kDraws);
  if (HasElementsOf(*context_.job, layout, mean)) {
    Elements* const sums = change->Some();
    AddMeanOf(layout, mean, residual, sums);
    return encoder_->EncodeElements(id, codec_->InitialPlan(), *sums);
  }
  float* const sum = change->Whole(layout.elements);
  AddMean(layout, mean, *context_.backend, residual, sum);
  return EncodeAll(id, mean, sum);
}

absl::StatusOr<EncodedFrame> UpdateCompressor::EncodeAll(const FrameIdentity& id, const Update& mean, float* sum) {
  const BucketLayout& layout = *context_.layout;
  std::vector<RunInput> runs(layout.runs.size());
  if (codec_->chooses_by_mean()) mean_.resize(layout.elements);
  for (size_t first = 0, last = 0; first < runs.size(); first = last) {
    while (last < runs.size() && layout.runs[last].tensor == layout.runs[first].tensor) ++last;
    const uint64_t begin = layout.run_begin[first];
    const Selection selection =
        SelectThreshold(*codec_, mean.round, {sum + begin, layout.run_begin[last] - begin}, *context_.backend);
    for (size_t r = first; r < last; ++r) {
      float* const at = sum + layout.run_begin[r];
      runs[r] = {.gradient = at, .pending = at, .selection = selection};
      if (!codec_->chooses_by_mean()) continue;
      runs[r].gradient = mean_.data() + layout.run_begin[r];
      mean.MeanOfRun(layout, static_cast<uint32_t>(r), mean_.data() + layout.run_begin[r]);
    }
  }
  return encoder_->Encode(id, codec_->InitialPlan(), runs);
}

absl::Status ReplayResidual(const Job& job, const BucketLayout& layout, const RoundPlan& plan,
                            std::span<const Bytes> mean, const Update& update, kernels::Backend& backend,
                            const float* residual, ResidualChange* change) {
  change->Clear();
  if (update.body == Update::Body::kEmpty || update.replaces) return absl::OkStatus();
  if (mean.empty()) {
    return absl::DataLossError(
        absl::StrFormat("bucket %d: the record of round %d lacks the mean that its update was compressed from",
                        layout.bucket, update.round));
  }
  GW_ASSIGN_OR_RETURN(const Update before, DecodeMean(mean, job, layout, plan));
  if (before.round != update.round) {
    return absl::DataLossError(absl::StrFormat("bucket %d: the update of round %d has the mean of round %d beside it",
                                               layout.bucket, update.round, before.round));
  }
  if (HasElementsOf(job, layout, before)) {
    AddMeanOf(layout, before, residual, change->Some());
    if (Subtract(update, change->Some()).ok()) return absl::OkStatus();
    return absl::DataLossError(absl::StrFormat("bucket %d: the update of round %d has other elements than its mean",
                                               layout.bucket, update.round));
  }
  float* const next = change->Whole(layout.elements);
  AddMean(layout, before, backend, residual, next);
  for (size_t k = 0; k < update.values.size(); ++k) next[update.positions[k]] -= update.values[k];
  for (const Update::DensePart& part : update.dense) {
    for (uint32_t i = 0; i < part.count; ++i) {
      float sent;
      std::memcpy(&sent, part.values.data() + 4 * size_t{i}, sizeof(sent));
      next[part.begin + i] -= sent;
    }
  }
  return absl::OkStatus();
}

void ResidualChange::Clear() {
  whole_ = false;
  some_.positions.clear();
  some_.values.clear();
}

float* ResidualChange::Whole(uint64_t elements) {
  whole_ = true;
  all_.resize(elements);
  return all_.data();
}

Elements* ResidualChange::Some() {
  whole_ = false;
  return &some_;
}

void ResidualChange::ApplyTo(float* residual) const {
  if (whole_) {
    std::copy(all_.begin(), all_.end(), residual);
    return;
  }
  for (size_t k = 0; k < some_.positions.size(); ++k) residual[some_.positions[k]] = some_.values[k];
}

void ResidualChange::MoveTo(LargeArray<float>* residual) {
  if (whole_) {
    std::swap(*residual, all_);
  } else {
    ApplyTo(residual->data());
  }
  Clear();
}

}  // namespace gradwire

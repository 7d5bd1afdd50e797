// Decoding update frames. Nothing of the input is trusted: every range is checked against the bucket's layout.
#include "common/codec/update/update.h"

#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/bits/run_values.h"
#include "common/codec/family.h"
#include "common/codec/frame/frame_header.h"
#include "common/codec/frame/parameters.h"
#include "common/codec/plan/plan_check.h"
#include "common/codec/update/update_body.h"
#include "common/job/norms.h"
#include "kernels/cpu/reference/clones.h"
#include "kernels/math/fixed_point.h"

namespace gradwire {
namespace {

using wire::Segment;
using wire::SegmentType;

GW_CLONES void MeansOfIntegers(const int32_t* sums, size_t n, float unit, float contributors, float* out) {
  for (size_t i = 0; i < n; ++i) out[i] = kernels::MeanOfInteger(sums[i], unit, contributors);
}

// The norms in an update frame.
class NormReader {
 public:
  NormReader(const Job& job, const BucketLayout& layout, Update* update)
      : per_tensor_(NormsOf(job).size()),
        tensors_(per_tensor_ == 0 ? 0 : TensorsOf(layout).size()),
        clips_(ClipsNorm(job)),
        update_(update) {}

  absl::Status Read(const Segment& s) {
    const bool of_all = s.param == 0;
    const uint64_t values = of_all ? 1 : uint64_t{s.count} * per_tensor_;
    const bool fits = of_all ? clips_ && !update_->mean_square && s.begin == 0 && s.count == 1
                             : s.param == per_tensor_ && s.begin == update_->norms.size() / per_tensor_ &&
                                   s.count <= tensors_ - s.begin;
    if (!fits || s.bytes != 8 * values) {
      return absl::InvalidArgumentError(
          absl::StrFormat("norms of %d tensors from %d on, %d of each, in %d bytes; the slice has %d tensors with %d",
                          s.count, s.begin, s.param, s.bytes, tensors_, per_tensor_));
    }
    if (!of_all) update_->norms.resize(update_->norms.size() + values);
    double* const out =
        of_all ? &update_->mean_square.emplace() : update_->norms.data() + update_->norms.size() - values;
    if (s.bytes != 0) std::memcpy(out, s.data, s.bytes);
    return absl::OkStatus();
  }

 private:
  const size_t per_tensor_;
  const size_t tensors_;
  const bool clips_;
  Update* const update_;
};

// Folds the segments of one update frame, in order, into an Update.
class UpdateReader {
 public:
  // `compressed`: what the body is encoded by; null: it is as the bucket's accumulator wrote it.
  UpdateReader(const Job& job, const BucketLayout& layout, const CodecSpec* compressed, Update* update)
      : job_(job),
        layout_(layout),
        compressed_(compressed),
        update_(update),
        norms_(job, layout, update),
        body_(&layout, update),
        reader_(compressed == nullptr ? FamilyOf(job, layout).NewSumReader(job, layout)
                                      : FamilyOf(*compressed).NewCompressedReader(job, layout, *compressed)) {}

  // `s` lies in `chunk`.
  absl::Status Read(const Segment& s, const Bytes& chunk) {
    if (compressed_ != nullptr && IsUpdateBody(s.type) &&
        s.type != FamilyOf(*compressed_).CompressedType(*compressed_)) {
      return absl::InvalidArgumentError(absl::StrFormat("segment type %d does not belong in an update frame of %s",
                                                        static_cast<int>(s.type), ToString(*compressed_)));
    }
    switch (s.type) {
      case SegmentType::kLearningRates:
        return ReadLearningRates(s);
      case SegmentType::kDenseF32:
        return ReadFloats(s, chunk);
      case SegmentType::kDeferred:
        return body_.AppendPositions(s, &update_->deferred);
      case SegmentType::kExponents:
        return ReadExponents(s);
      case SegmentType::kGeometry:
        return ReadGeometry(s);
      case SegmentType::kNorms:
        return norms_.Read(s);
      default:
        return reader_->Read(s, chunk, &body_);
    }
  }

  // `plan`: of the round.
  absl::Status Finish(const RoundPlan& plan) {
    GW_RETURN_IF_ERROR(body_.Check());
    if (update_->learning_rates.size() != static_cast<size_t>(job_.spec().optimizer().groups_size())) {
      return absl::InvalidArgumentError(absl::StrFormat("update frame has %d learning rates, the job has %d groups",
                                                        update_->learning_rates.size(),
                                                        job_.spec().optimizer().groups_size()));
    }
    return reader_->Finish(plan, &body_);
  }

 private:
  absl::Status ReadLearningRates(const Segment& s) {
    GW_RETURN_IF_ERROR(CheckBytes(s, uint64_t{s.count} * 4));
    if (!update_->learning_rates.empty()) return absl::InvalidArgumentError("learning rates appear twice");
    update_->learning_rates.resize(s.count);
    if (s.bytes != 0) std::memcpy(update_->learning_rates.data(), s.data, s.bytes);
    for (float rate : update_->learning_rates) {
      if (!std::isfinite(rate)) {
        return absl::InvalidArgumentError(absl::StrFormat("update frame: learning rate %g is not finite", rate));
      }
    }
    return absl::OkStatus();
  }

  absl::Status ReadFloats(const Segment& s, const Bytes& chunk) {
    GW_RETURN_IF_ERROR(body_.Begin(Update::Body::kDenseFloat));
    GW_RETURN_IF_ERROR(CheckBytes(s, uint64_t{s.count} * 4));
    GW_RETURN_IF_ERROR(body_.Advance(s));
    body_.AddPart(s, PayloadOf(s, chunk));
    return absl::OkStatus();
  }

  absl::Status ReadExponents(const Segment& s) {
    if (s.begin != 0 || s.count != layout_.runs.size()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("exponents of %d runs; the bucket has %d", s.count, layout_.runs.size()));
    }
    return DecodeRuns(static_cast<RunCoding>(s.param), s.payload(), s.count, &update_->next.exponents);
  }

  absl::Status ReadGeometry(const Segment& s) {
    GW_RETURN_IF_ERROR(CheckBytes(s, 8));
    std::memcpy(&update_->next.sketch_groups, s.data, 4);
    std::memcpy(&update_->next.cells_per_group, s.data + 4, 4);
    return absl::OkStatus();
  }

  const Job& job_;
  const BucketLayout& layout_;
  const CodecSpec* const compressed_;
  Update* update_;
  NormReader norms_;
  BodyBuilder body_;
  const std::unique_ptr<BodyReader> reader_;
};

enum class Content { kWhole, kPlan };

// `chunks`: in order.
absl::StatusOr<Update> Decode(std::span<const wire::Chunk> chunks, const Job& job, const BucketLayout& layout,
                              const RoundPlan& plan, const CodecSpec* compressed, Content content = Content::kWhole) {
  const wire::FrameHeader& header = chunks[0].header;
  if (header.kind != wire::FrameKind::kUpdate || header.bucket != layout.bucket || header.shard != layout.shard ||
      header.shape_digest != layout.shape_digest) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "not the update frame of bucket %d on shard %d (kind %d, bucket %d, shard %d, shape 0x%08x, expected 0x%08x)",
        layout.bucket, layout.shard, static_cast<int>(header.kind), header.bucket, header.shard, header.shape_digest,
        layout.shape_digest));
  }
  const bool without_body = (header.flags & wire::kWithoutBody) != 0;
  if (without_body != (content == Content::kPlan)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("update frame of round %d %s its body", header.round, without_body ? "is without" : "has"));
  }
  Update update = BeginUpdate(header);
  const bool no_step = update.skipped || update.replaces;
  if (update.nonfinite_rounds > update.round || (no_step && update.nonfinite_rounds == 0) ||
      (update.skipped && (update.replaces || !SkipsNonFinite(job)))) {
    return absl::InvalidArgumentError(
        absl::StrFormat("update frame of round %d says that %d rounds were no steps, %s this one%s%s", update.round,
                        update.nonfinite_rounds, no_step ? "with" : "without", update.skipped ? ", skipped" : "",
                        update.replaces ? ", whose parameters were replaced" : ""));
  }
  update.exponents = plan.exponents;
  UpdateReader reader(job, layout, update.replaces ? nullptr : compressed, &update);
  for (const wire::Chunk& chunk : chunks) {
    for (const Segment& s : chunk.segments) {
      if (without_body && IsUpdateBody(s.type))
        return absl::InvalidArgumentError("update frame without its body has a part of it");
      GW_RETURN_IF_ERROR(reader.Read(s, chunk.bytes));
    }
  }
  GW_RETURN_IF_ERROR(reader.Finish(plan));
  GW_RETURN_IF_ERROR(CheckPlan(job, layout, update.round + 1, update.next));
  if (update.integers_of_exponents() && update.exponents.size() != layout.runs.size()) {
    return MissingExponents(update);
  }
  if (no_step && update.contributors != 0) {
    return absl::InvalidArgumentError("update frame of a round that is no step has contributors");
  }
  const bool parameters = update.body == Update::Body::kDenseFloat || layout.elements == 0 || without_body;
  if (update.replaces && (!parameters || !update.deferred.empty())) {
    return absl::InvalidArgumentError("update frame that replaces parameters has another body than parameters");
  }
  if (update.body != Update::Body::kEmpty && update.contributors == 0 && !update.replaces) {
    return absl::InvalidArgumentError("update frame has a body but no contributors");
  }
  return update;
}

const CodecSpec* UpdateCodecOf(const Job& job, const BucketLayout& layout) {
  const std::optional<CodecSpec>& codec = job.update_codecs()[layout.codec];
  return codec ? &*codec : nullptr;
}

}  // namespace

Update BeginUpdate(const wire::FrameHeader& header) {
  Update update;
  update.round = header.round;
  update.contributors = header.contributors;
  update.skipped = (header.flags & wire::kNonFinite) != 0;
  update.replaces = (header.flags & wire::kReplace) != 0;
  update.nonfinite_rounds = header.nonfinite_rounds;
  return update;
}

absl::StatusOr<Update> DecodeUpdate(std::span<const Bytes> chunks, const Job& job, const BucketLayout& layout,
                                    const RoundPlan& plan) {
  GW_ASSIGN_OR_RETURN(const std::vector<wire::Chunk> parsed, wire::ParseFrame(chunks));
  return Decode(parsed, job, layout, plan, UpdateCodecOf(job, layout));
}

absl::StatusOr<Update> DecodeUpdate(std::span<const wire::Chunk> chunks, const Job& job, const BucketLayout& layout,
                                    const RoundPlan& plan) {
  GW_RETURN_IF_ERROR(wire::CheckOrder(chunks));
  return Decode(chunks, job, layout, plan, UpdateCodecOf(job, layout));
}

absl::StatusOr<Update> DecodePlan(std::span<const wire::Chunk> chunks, const Job& job, const BucketLayout& layout,
                                  const RoundPlan& plan) {
  GW_RETURN_IF_ERROR(wire::CheckOrder(chunks));
  return Decode(chunks, job, layout, plan, UpdateCodecOf(job, layout), Content::kPlan);
}

absl::StatusOr<std::vector<Bytes>> WithoutBody(std::span<const Bytes> chunks) {
  GW_ASSIGN_OR_RETURN(const std::vector<wire::Chunk> parsed, wire::ParseFrame(chunks));
  wire::FrameHeader header = parsed[0].header;
  header.flags = static_cast<uint16_t>((header.flags & ~wire::kLastChunk) | wire::kWithoutBody);
  wire::FrameWriter writer(header);
  for (const wire::Chunk& chunk : parsed) {
    for (const Segment& s : chunk.segments) {
      if (!IsUpdateBody(s.type)) writer.Add(s, s.data);
    }
  }
  return writer.Finish();
}

absl::StatusOr<Update> DecodeMean(std::span<const Bytes> chunks, const Job& job, const BucketLayout& layout,
                                  const RoundPlan& plan) {
  GW_ASSIGN_OR_RETURN(const std::vector<wire::Chunk> parsed, wire::ParseFrame(chunks));
  return Decode(parsed, job, layout, plan, nullptr);
}

namespace {

// An update frame that is no step, up to where its body would begin.
wire::FrameWriter BeginNoStep(const FrameIdentity& id, const BucketLayout& layout, const RoundPlan& plan,
                              wire::FrameFlags flag) {
  wire::FrameWriter writer = BeginUpdateFrame(id, layout, /*contributors=*/0, flag);
  if (!plan.exponents.empty()) {
    const uint32_t runs = static_cast<uint32_t>(plan.exponents.size());
    writer.Add({SegmentType::kExponents, 0, 0, runs, runs}, plan.exponents.data());
  }
  if (plan.sketch_groups != 0) {
    const uint32_t geometry[2] = {plan.sketch_groups, plan.cells_per_group};
    writer.Add({SegmentType::kGeometry, 0, 0, 2, sizeof(geometry)}, geometry);
  }
  return writer;
}

}  // namespace

UpdateFrame SkippedUpdate(const FrameIdentity& id, const BucketLayout& layout, const RoundPlan& plan) {
  UpdateFrame update;
  update.chunks = BeginNoStep(id, layout, plan, wire::kNonFinite).Finish();
  update.next = plan;
  update.skipped = true;
  return update;
}

UpdateFrame ReplacingUpdate(const FrameIdentity& id, const BucketLayout& layout, const RoundPlan& plan,
                            const float* parameters) {
  wire::FrameWriter writer = BeginNoStep(id, layout, plan, wire::kReplace);
  AddParameters(parameters, layout.elements, &writer);
  UpdateFrame update;
  update.chunks = writer.Finish();
  update.next = plan;
  update.replaces = true;
  return update;
}

absl::Status DecodeNorms(std::span<const Bytes> chunks, const Job& job, const BucketLayout& layout, Update* update) {
  NormReader reader(job, layout, update);
  for (const Bytes& bytes : chunks) {
    GW_ASSIGN_OR_RETURN(const wire::Chunk chunk, wire::ParseChunk(bytes));
    for (const Segment& s : chunk.segments) {
      if (s.type == SegmentType::kNorms) GW_RETURN_IF_ERROR(reader.Read(s));
    }
  }
  return absl::OkStatus();
}

void AppendNorms(const Job& job, const Update& update, std::vector<Bytes>* chunks) {
  // Finished by us: it is whole.
  wire::FrameWriter writer(wire::ParseHeader(chunks->back().span()).value());
  const size_t per_tensor = NormsOf(job).size();
  if (per_tensor == 0) return;
  const size_t tensors = update.norms.size() / per_tensor;
  const size_t most = writer.max_payload() / (8 * per_tensor);
  for (size_t begin = 0; begin < tensors; begin += most) {
    const size_t count = std::min(most, tensors - begin);
    wire::SegmentHeader header;
    header.type = SegmentType::kNorms;
    header.param = static_cast<uint8_t>(per_tensor);
    header.begin = begin;
    header.count = static_cast<uint32_t>(count);
    header.bytes = static_cast<uint32_t>(8 * per_tensor * count);
    writer.Add(header, update.norms.data() + per_tensor * begin);
  }
  if (update.mean_square) {
    wire::SegmentHeader header;
    header.type = SegmentType::kNorms;
    header.count = 1;
    header.bytes = 8;
    writer.Add(header, &*update.mean_square);
  }
  wire::AppendFrame(chunks, writer.Finish());
}

std::vector<Update::DensePart>::const_iterator Update::PartWith(uint64_t element) const {
  return std::upper_bound(dense.begin(), dense.end(), element,
                          [](uint64_t position, const DensePart& part) { return position < part.begin + part.count; });
}

const float* Update::MeanInPlace(const BucketLayout& layout, uint32_t run) const {
  if (body != Body::kDenseFloat) return nullptr;
  const uint64_t begin = layout.run_begin[run];
  const auto part = PartWith(begin);
  if (layout.run_begin[run + 1] > part->begin + part->count) return nullptr;
  const uint8_t* const values = part->values.data() + sizeof(float) * (begin - part->begin);
  return reinterpret_cast<uintptr_t>(values) % alignof(float) == 0 ? reinterpret_cast<const float*>(values) : nullptr;
}

void Update::MeanOfRun(const BucketLayout& layout, uint32_t run, float* out) const {
  const uint64_t begin = layout.run_begin[run];
  const uint32_t length = layout.runs[run].length;
  if (body == Body::kDenseFloat) {
    CopyDense(begin, length, out);
    return;
  }
  if (body == Body::kEmpty) {
    std::fill(out, out + length, 0.0f);
    return;
  }
  if (body == Body::kSparseFloat) {
    std::fill(out, out + length, 0.0f);
    auto at = std::lower_bound(positions.begin(), positions.end(), begin);
    for (; at != positions.end() && *at < begin + length; ++at) {
      out[*at - begin] = values[static_cast<size_t>(at - positions.begin())];
    }
    return;
  }
  const float scale = std::ldexp(1.0f, exponents[run]);
  const float count = static_cast<float>(contributors);
  if (body == Body::kDenseInt) {
    constexpr uint32_t kPiece = 1024;
    int32_t sums[kPiece];
    for (uint32_t first = 0; first < length; first += kPiece) {
      const uint32_t n = std::min(kPiece, length - first);
      CopyDense(begin + first, n, sums);
      MeansOfIntegers(sums, n, scale, count, out + first);
    }
    return;
  }
  std::fill(out, out + length, 0.0f);
  auto it = std::lower_bound(positions.begin(), positions.end(), begin);
  for (; it != positions.end() && *it < begin + length; ++it) {
    out[*it - begin] = static_cast<float>(integers[static_cast<size_t>(it - positions.begin())]) * scale / count;
  }
}

}  // namespace gradwire

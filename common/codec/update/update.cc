// Decoding update frames. Nothing of the input is trusted: every range is checked against the bucket's layout.
#include "common/codec/update/update.h"

#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/bits/index_code.h"
#include "common/codec/frame/frame_header.h"
#include "common/codec/frame/parameters.h"
#include "common/codec/homomorphic/homomorphic_codec.h"
#include "common/codec/plan/plan_check.h"
#include "common/codec/plan/ranges.h"
#include "common/codec/powersgd/factor_frames.h"
#include "common/codec/quantized/quantized_shape.h"
#include "common/codec/sparse/sparse_segment.h"
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

absl::Status MissingExponents(const Update& update) {
  return absl::FailedPreconditionError(absl::StrFormat(
      "update frame of round %d needs the exponents of its round; they are not known here", update.round));
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
        matrices_(powersgd::MatricesOf(job, layout)) {
    const auto* spec = std::get_if<SparseSpec>(compressed != nullptr ? compressed : &job.codecs()[layout.codec]);
    if (spec != nullptr && spec->choice == SparseSpec::Choice::kRandomK) {
      agreement_ = {&job, &layout, update->round, spec->density};
    }
  }

  // `s` lies in `chunk`.
  absl::Status Read(const Segment& s, const Bytes& chunk) {
    if (compressed_ != nullptr && IsUpdateBody(s.type) && s.type != UpdateBodyOf(*compressed_)) {
      return absl::InvalidArgumentError(absl::StrFormat("segment type %d does not belong in an update frame of %s",
                                                        static_cast<int>(s.type), ToString(*compressed_)));
    }
    switch (s.type) {
      case SegmentType::kLearningRates:
        return ReadLearningRates(s);
      case SegmentType::kDenseF32:
        return ReadFloats(s, chunk);
      case SegmentType::kDenseBf16:
        return ReadBf16(s);
      case SegmentType::kQuantized:
        return ReadQuantized(s);
      case SegmentType::kDenseInt:
      case SegmentType::kDensePacked:
        return ReadDenseIntegers(s, chunk);
      case SegmentType::kLevelSums:
        return ReadLevelSums(s);
      case SegmentType::kIndex:
        GW_RETURN_IF_ERROR(SetBody(Update::Body::kSparse));
        return ReadPositions(s, &update_->positions);
      case SegmentType::kValues:
        return ReadIntegers(s);
      case SegmentType::kSparse:
        return ReadPairs(s);
      case SegmentType::kDeferred:
        return ReadPositions(s, &update_->deferred);
      case SegmentType::kExponents:
        return ReadExponents(s);
      case SegmentType::kGeometry:
        return ReadGeometry(s);
      case SegmentType::kFactors:
        return powersgd::ReadFactors(s, powersgd::SizeOf(matrices_, powersgd::FactorSentIn(update_->round)),
                                     &update_->next.factors);
      case SegmentType::kNorms:
        return norms_.Read(s);
      default:
        return absl::InvalidArgumentError(
            absl::StrFormat("segment type %d does not belong in an update frame", static_cast<int>(s.type)));
    }
  }

  // `plan`: of the round.
  absl::Status Finish(const RoundPlan& plan) {
    GW_RETURN_IF_ERROR(CheckWhole());
    return powersgd::FinishUpdate(matrices_, plan.factors, layout_, update_);
  }

 private:
  absl::Status CheckWhole() const {
    const Update::Body body = update_->body;
    if (body != Update::Body::kEmpty && body != Update::Body::kSparse && covered_ != layout_.elements) {
      return absl::InvalidArgumentError(
          absl::StrFormat("update frame covers %d of %d elements", covered_, layout_.elements));
    }
    if (update_->positions.size() != update_->integers.size() && body == Update::Body::kSparse) {
      return absl::InvalidArgumentError(absl::StrFormat("update frame has %d positions and %d values",
                                                        update_->positions.size(), update_->integers.size()));
    }
    if (update_->learning_rates.size() != static_cast<size_t>(job_.spec().optimizer().groups_size())) {
      return absl::InvalidArgumentError(absl::StrFormat("update frame has %d learning rates, the job has %d groups",
                                                        update_->learning_rates.size(),
                                                        job_.spec().optimizer().groups_size()));
    }
    return absl::OkStatus();
  }

  absl::Status CheckRange(const Segment& s, uint64_t limit) const {
    if (s.begin <= limit && s.count <= limit - s.begin) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrFormat("segment type %d covers [%d, %d + %d) of %d",
                                                      static_cast<int>(s.type), s.begin, s.begin, s.count, limit));
  }

  absl::Status CheckBytes(const Segment& s, uint64_t expected) const {
    if (s.bytes == expected) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrFormat("segment type %d has %d bytes of payload, expected %d",
                                                      static_cast<int>(s.type), s.bytes, expected));
  }

  absl::Status SetBody(Update::Body body) {
    if (update_->body != Update::Body::kEmpty && update_->body != body) {
      return absl::InvalidArgumentError("update frame mixes two kinds of body");
    }
    update_->body = body;
    return absl::OkStatus();
  }

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

  // These segments cover the bucket once, in order.
  absl::Status Advance(const Segment& s) {
    GW_RETURN_IF_ERROR(CheckRange(s, layout_.elements));
    if (s.begin != covered_) {
      return absl::InvalidArgumentError(absl::StrFormat("segment begins at %d, expected %d", s.begin, covered_));
    }
    covered_ += s.count;
    return absl::OkStatus();
  }

  void AddPart(const Segment& s, Bytes values) {
    if (s.count != 0) update_->dense.push_back({s.begin, s.count, std::move(values)});
  }

  static Bytes PayloadOf(const Segment& s, const Bytes& chunk) {
    return chunk.Slice(static_cast<size_t>(s.data - chunk.data()), s.bytes);
  }

  absl::Status ReadFloats(const Segment& s, const Bytes& chunk) {
    GW_RETURN_IF_ERROR(SetBody(Update::Body::kDenseFloat));
    GW_RETURN_IF_ERROR(CheckBytes(s, uint64_t{s.count} * 4));
    GW_RETURN_IF_ERROR(Advance(s));
    AddPart(s, PayloadOf(s, chunk));
    return absl::OkStatus();
  }

  absl::Status ReadLevelSums(const Segment& s) {
    const auto* spec = std::get_if<HomomorphicSpec>(&job_.codecs()[layout_.codec]);
    if (spec == nullptr) return absl::InvalidArgumentError("the bucket's codec has no sums of levels");
    if (update_->exponents.size() != layout_.runs.size()) return MissingExponents(*update_);
    if (means_reader_ == nullptr) means_reader_ = std::make_unique<homomorphic::MeansReader>(&job_, &layout_, *spec);
    GW_RETURN_IF_ERROR(SetBody(Update::Body::kDenseFloat));
    GW_RETURN_IF_ERROR(Advance(s));
    std::shared_ptr<float[]> means = std::make_shared_for_overwrite<float[]>(s.count);
    GW_RETURN_IF_ERROR(means_reader_->Read(s, update_->round, update_->exponents, update_->contributors, means.get()));
    const uint8_t* values = reinterpret_cast<const uint8_t*>(means.get());
    AddPart(s, Bytes(std::move(means), values, size_t{4} * s.count));
    return absl::OkStatus();
  }

  // Memory for the values of a part that travels in another form.
  float* NewPart(const Segment& s) {
    std::shared_ptr<float[]> values = std::make_shared_for_overwrite<float[]>(s.count);
    float* const out = values.get();
    AddPart(s, Bytes(std::move(values), reinterpret_cast<const uint8_t*>(out), size_t{4} * s.count));
    return out;
  }

  absl::Status ReadBf16(const Segment& s) {
    GW_RETURN_IF_ERROR(SetBody(Update::Body::kDenseFloat));
    GW_RETURN_IF_ERROR(CheckBytes(s, uint64_t{s.count} * 2));
    GW_RETURN_IF_ERROR(Advance(s));
    float* const out = NewPart(s);
    for (uint32_t i = 0; i < s.count; ++i) {
      uint16_t bits;
      std::memcpy(&bits, s.data + 2 * size_t{i}, sizeof(bits));
      out[i] = kernels::Bf16ToFloat(bits);
    }
    return absl::OkStatus();
  }

  absl::Status ReadQuantized(const Segment& s) {
    const auto* spec = compressed_ == nullptr ? nullptr : std::get_if<QuantizedSpec>(compressed_);
    if (spec == nullptr) return absl::InvalidArgumentError("a quantized update of a bucket whose update codec is none");
    if (!quantized_) quantized_ = {{&job_, &layout_, nullptr}, *spec, quantized::MakeQuantizer(*spec)};
    GW_RETURN_IF_ERROR(SetBody(Update::Body::kDenseFloat));
    GW_RETURN_IF_ERROR(quantized_->CheckSegment(update_->round, s));
    GW_RETURN_IF_ERROR(Advance(s));
    return quantized_->Decode(s, NewPart(s));
  }

  absl::Status ReadDenseIntegers(const Segment& s, const Bytes& chunk) {
    GW_RETURN_IF_ERROR(SetBody(Update::Body::kDenseInt));
    GW_RETURN_IF_ERROR(Advance(s));
    if (s.type == SegmentType::kDensePacked) {
      std::shared_ptr<int32_t[]> unpacked = std::make_shared_for_overwrite<int32_t[]>(s.count);
      GW_RETURN_IF_ERROR(UnpackIntegers(s.payload(), s.param, s.count, unpacked.get()));
      const uint8_t* values = reinterpret_cast<const uint8_t*>(unpacked.get());
      AddPart(s, Bytes(std::move(unpacked), values, size_t{4} * s.count));
      return absl::OkStatus();
    }
    if (s.param != 4) return absl::InvalidArgumentError("dense integers of an update frame are 4 bytes wide");
    GW_RETURN_IF_ERROR(CheckBytes(s, uint64_t{s.count} * 4));
    AddPart(s, PayloadOf(s, chunk));
    return absl::OkStatus();
  }

  absl::Status ReadPositions(const Segment& s, std::vector<uint32_t>* out) {
    GW_RETURN_IF_ERROR(CheckRange(s, layout_.elements));
    const size_t before = out->size();
    if (before != 0 && s.begin <= out->back()) return absl::InvalidArgumentError("position blocks are not ascending");
    return DecodeIndex(static_cast<IndexCoding>(s.param), s.payload(), static_cast<uint32_t>(s.begin), s.count, out);
  }

  absl::Status ReadIntegers(const Segment& s) {
    GW_RETURN_IF_ERROR(SetBody(Update::Body::kSparse));
    const size_t before = update_->integers.size();
    if (before + s.count != update_->positions.size()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%d values for %d positions", before + s.count, update_->positions.size()));
    }
    update_->integers.resize(before + s.count);
    return UnpackIntegers(s.payload(), s.param, s.count, update_->integers.data() + before);
  }

  absl::Status ReadPairs(const Segment& s) {
    GW_RETURN_IF_ERROR(SetBody(Update::Body::kSparseFloat));
    GW_RETURN_IF_ERROR(Advance(s));
    sparse::Pairs pairs;
    GW_RETURN_IF_ERROR(sparse::ReadPairs(s, agreement_, &pairs));
    update_->positions.insert(update_->positions.end(), pairs.positions.begin(), pairs.positions.end());
    update_->values.insert(update_->values.end(), pairs.values.begin(), pairs.values.end());
    return absl::OkStatus();
  }

  absl::Status ReadExponents(const Segment& s) {
    GW_RETURN_IF_ERROR(CheckBytes(s, s.count));
    if (s.begin != 0 || s.count != layout_.runs.size()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("exponents of %d runs; the bucket has %d", s.count, layout_.runs.size()));
    }
    update_->next.exponents.assign(s.data, s.data + s.bytes);
    return absl::OkStatus();
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
  const std::vector<powersgd::Matrix> matrices_;
  sparse::Agreement agreement_;
  std::unique_ptr<homomorphic::MeansReader> means_reader_;  // once there is something to read
  std::optional<quantized::Shape> quantized_;
  uint64_t covered_ = 0;
};

absl::StatusOr<Update> Decode(std::span<const Bytes> chunks, const Job& job, const BucketLayout& layout,
                              const RoundPlan& plan, const CodecSpec* compressed) {
  GW_ASSIGN_OR_RETURN(const std::vector<wire::Chunk> parsed, wire::ParseFrame(chunks));
  const wire::FrameHeader& header = parsed[0].header;
  if (header.kind != wire::FrameKind::kUpdate || header.bucket != layout.bucket || header.shard != layout.shard ||
      header.shape_digest != layout.shape_digest) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "not the update frame of bucket %d on shard %d (kind %d, bucket %d, shard %d, shape 0x%08x, expected 0x%08x)",
        layout.bucket, layout.shard, static_cast<int>(header.kind), header.bucket, header.shard, header.shape_digest,
        layout.shape_digest));
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
  for (const wire::Chunk& chunk : parsed) {
    for (const Segment& s : chunk.segments) GW_RETURN_IF_ERROR(reader.Read(s, chunk.bytes));
  }
  GW_RETURN_IF_ERROR(reader.Finish(plan));
  GW_RETURN_IF_ERROR(CheckPlan(job, layout, update.round + 1, update.next));
  if (update.integers_of_exponents() && update.exponents.size() != layout.runs.size()) {
    return MissingExponents(update);
  }
  if (no_step && update.contributors != 0) {
    return absl::InvalidArgumentError("update frame of a round that is no step has contributors");
  }
  const bool parameters = update.body == Update::Body::kDenseFloat || layout.elements == 0;
  if (update.replaces && (!parameters || !update.deferred.empty())) {
    return absl::InvalidArgumentError("update frame that replaces parameters has another body than parameters");
  }
  if (update.body != Update::Body::kEmpty && update.contributors == 0 && !update.replaces) {
    return absl::InvalidArgumentError("update frame has a body but no contributors");
  }
  return update;
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
  const std::optional<CodecSpec>& compressed = job.update_codecs()[layout.codec];
  return Decode(chunks, job, layout, plan, compressed ? &*compressed : nullptr);
}

absl::StatusOr<Update> DecodeMean(std::span<const Bytes> chunks, const Job& job, const BucketLayout& layout,
                                  const RoundPlan& plan) {
  return Decode(chunks, job, layout, plan, nullptr);
}

namespace {

// An update frame that is no step, up to where its body would begin.
wire::FrameWriter BeginNoStep(const FrameIdentity& id, const BucketLayout& layout, const RoundPlan& plan,
                              wire::FrameFlags flag) {
  wire::FrameHeader header = HeaderFor(id, wire::FrameKind::kUpdate, layout.shape_digest);
  header.flags = flag;
  wire::FrameWriter writer(header);
  const uint32_t groups = static_cast<uint32_t>(id.learning_rates.size());
  writer.Add({SegmentType::kLearningRates, 0, 0, groups, groups * 4}, id.learning_rates.data());
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

// Parameter frames: the initial upload and pulls of a version.
#include "common/codec/frame/parameters.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/family.h"
#include "common/codec/frame/run_pieces.h"
#include "common/codec/plan/factor_segments.h"
#include "common/codec/plan/plan_check.h"
#include "common/job/norms.h"
#include "kernels/cpu/reference/clones.h"
#include "kernels/cpu/reference/loops.h"
#include "kernels/math/fixed_point.h"

namespace gradwire {
namespace {

using kernels::reference::FindMagnitude;
using kernels::reference::kInfinityBits;
using wire::FrameWriter;
using wire::Segment;
using wire::SegmentType;

constexpr uint64_t kElementsOfSegment = 65536;

// Plain loops, which the compiler vectorises.
GW_CLONES void ReadBf16(const uint8_t* __restrict from, uint64_t n, float* __restrict to) {
  for (uint64_t i = 0; i < n; ++i) {
    uint16_t half;
    std::memcpy(&half, from + 2 * i, 2);
    to[i] = kernels::FloatFromBits(uint32_t{half} << 16);
  }
}
GW_CLONES void WriteBf16(const float* __restrict from, uint32_t n, uint8_t* __restrict to) {
  for (uint32_t i = 0; i < n; ++i) {
    const uint16_t bits = kernels::FloatToBf16(from[i]);
    std::memcpy(to + 2 * size_t{i}, &bits, 2);
  }
}

uint32_t WidthOf(const Segment& s) { return s.type == SegmentType::kDenseF32 ? 4 : 2; }

void ReadFloats(const Segment& s, uint64_t first, uint64_t count, float* to) {
  if (WidthOf(s) == 4) {
    std::memcpy(to, s.data + 4 * first, 4 * count);
  } else {
    ReadBf16(s.data + 2 * first, count, to);
  }
}

// `lent`: as ParameterArrays'.
void AddFloats(const float* values, uint64_t elements, wire::Array array, const std::shared_ptr<const void>& lent,
               FrameWriter* writer) {
  for (uint64_t begin = 0; begin < elements; begin += kElementsOfSegment) {
    const uint32_t count = static_cast<uint32_t>(std::min(kElementsOfSegment, elements - begin));
    const wire::SegmentHeader header{SegmentType::kDenseF32, static_cast<uint8_t>(array), begin, count, count * 4};
    if (lent != nullptr) {
      writer->Borrow(header, lent, values + begin);
    } else {
      writer->Add(header, values + begin);
    }
  }
}

void AddBf16(const float* values, uint64_t elements, FrameWriter* writer) {
  for (uint64_t begin = 0; begin < elements; begin += kElementsOfSegment) {
    const uint32_t count = static_cast<uint32_t>(std::min(kElementsOfSegment, elements - begin));
    WriteBf16(values + begin, count, writer->Begin({SegmentType::kDenseBf16, 0, begin, count, count * 2}));
    writer->End();
  }
}

wire::FrameHeader HeaderFor(const BucketLayout& layout, wire::FrameKind kind, uint64_t version) {
  wire::FrameHeader h;
  h.kind = kind;
  h.bucket = layout.bucket;
  h.shard = static_cast<uint16_t>(layout.shard);
  h.round = version;
  h.shape_digest = layout.shape_digest;
  return h;
}

}  // namespace

// Takes the segments of a parameter frame; checks those that are wanted, and counts what the frame covers.
class ParameterReader {
 public:
  ParameterReader(const Job& job, const BucketLayout& layout, const ParametersWanted& wanted)
      : job_(job),
        layout_(layout),
        wanted_{wanted.parameter, wanted.first_moment, wanted.second_moment, wanted.update_residual},
        most_factors_(FamilyOf(job, layout).MostFactors(job, layout)) {}

  absl::Status Read(const Segment& s) {
    switch (s.type) {
      case SegmentType::kDenseF32:
      case SegmentType::kDenseBf16:
        return ReadDense(s);
      case SegmentType::kExponents:
        if (s.begin != 0 || s.bytes != s.count || s.count != layout_.runs.size()) break;
        unfinished_.exponents.assign(s.data, s.data + s.bytes);
        return absl::OkStatus();
      case SegmentType::kFactors:
        if (plans_.size() == PlansKept(job_)) break;
        return ReadFactors(s, most_factors_, &unfinished_.factors);
      case SegmentType::kGeometry:
        if (s.bytes != 8 || plans_.size() == PlansKept(job_)) break;
        std::memcpy(&unfinished_.sketch_groups, s.data, 4);
        std::memcpy(&unfinished_.cells_per_group, s.data + 4, 4);
        plans_.push_back(std::exchange(unfinished_, {}));
        return absl::OkStatus();
      default:
        break;
    }
    return absl::InvalidArgumentError(
        absl::StrFormat("segment type %d with %d bytes does not fit a parameter frame of bucket %d",
                        static_cast<int>(s.type), s.bytes, layout_.bucket));
  }

  absl::Status CheckComplete() const {
    for (size_t array = 0; array < std::size(wanted_); ++array) {
      if (!wanted_[array] || covered_[array] == layout_.elements) continue;
      return absl::InvalidArgumentError(
          absl::StrFormat("parameter frame of bucket %d has %d of %d elements of array %d", layout_.bucket,
                          covered_[array], layout_.elements, array));
    }
    return absl::OkStatus();
  }

  // Those of `version` and before, all that are kept then.
  absl::StatusOr<PlanWindow> TakePlans(uint64_t version, uint32_t nonfinite_rounds) {
    const uint64_t kept = std::min<uint64_t>(PlansKept(job_) - 1, version) + 1;
    if (plans_.size() != kept || unfinished_ != RoundPlan{}) {
      return absl::InvalidArgumentError(
          absl::StrFormat("the parameters of bucket %d at version %d carry %d plans, expected %d", layout_.bucket,
                          version, plans_.size(), kept));
    }
    for (uint64_t age = 0; const RoundPlan& plan : plans_)
      GW_RETURN_IF_ERROR(CheckPlan(job_, layout_, version - age++, plan));
    return PlanWindow(PlansKept(job_), version, std::move(plans_), nonfinite_rounds);
  }
  bool has_plans() const { return !plans_.empty() || unfinished_ != RoundPlan{}; }

  ParameterFrame Take(PlanWindow plans) {
    frame_.plans_ = std::move(plans);
    return std::move(frame_);
  }

 private:
  absl::Status ReadDense(const Segment& s) {
    const uint64_t width = WidthOf(s);
    if (s.param > 3 || (width == 2 && s.param != 0)) {
      return absl::InvalidArgumentError(absl::StrFormat("parameter segment names unknown array %d", s.param));
    }
    uint64_t& covered = covered_[s.param];
    if (s.begin != covered || s.count > layout_.elements - covered || s.bytes != s.count * width) {
      return absl::InvalidArgumentError(
          absl::StrFormat("parameter segment [%d, %d + %d) in %d bytes does not continue at %d of %d elements", s.begin,
                          s.begin, s.count, s.bytes, covered, layout_.elements));
    }
    covered += s.count;
    if (!wanted_[s.param] || s.count == 0) return absl::OkStatus();
    frame_.segments_[s.param].push_back(s);
    const int64_t bad = FindMagnitude(s.data, static_cast<int>(width), s.count, kInfinityBits);
    if (bad < 0) return absl::OkStatus();
    float value;
    ReadFloats(s, static_cast<uint64_t>(bad), 1, &value);
    return NonFinite(s.begin + static_cast<uint64_t>(bad), value);
  }

  absl::Status NonFinite(uint64_t position, float value) const {
    const size_t run = RunOf(layout_, position);
    const Run& r = layout_.runs[run];
    return absl::InvalidArgumentError(absl::StrFormat("tensor '%s', element %d: parameter %g is not finite",
                                                      job_.tensors()[r.tensor].name,
                                                      r.offset + position - layout_.run_begin[run], value));
  }

  const Job& job_;
  const BucketLayout& layout_;
  const bool wanted_[4];
  const uint64_t most_factors_;  // of a plan
  std::deque<RoundPlan> plans_;  // the newest first
  RoundPlan unfinished_;         // its geometry comes
  uint64_t covered_[4] = {0, 0, 0, 0};
  ParameterFrame frame_;
};

void ParameterFrame::Read(wire::Array array, uint64_t begin, uint64_t count, float* to) const {
  const std::vector<Segment>& segments = segments_[static_cast<size_t>(array)];
  auto s = std::ranges::upper_bound(segments, begin, {}, &Segment::begin);
  if (s != segments.begin()) --s;
  for (; count > 0; ++s) {
    const uint64_t first = begin - s->begin;
    const uint64_t n = std::min<uint64_t>(count, s->count - first);
    ReadFloats(*s, first, n, to);
    begin += n;
    count -= n;
    to += n;
  }
}

std::vector<Bytes> EncodeInitialize(const BucketLayout& layout, uint64_t incarnation, const float* parameters) {
  wire::FrameHeader header = HeaderFor(layout, wire::FrameKind::kInitialize, 0);
  header.incarnation = incarnation;
  FrameWriter writer(header);
  AddParameters(parameters, layout.elements, &writer);
  return writer.Finish();
}

std::vector<Bytes> EncodeReplacement(const BucketLayout& layout, uint64_t round, uint64_t incarnation,
                                     const float* parameters) {
  wire::FrameHeader header = HeaderFor(layout, wire::FrameKind::kPush, round);
  header.flags = wire::kAbstain | wire::kReplace;
  header.incarnation = incarnation;
  FrameWriter writer(header);
  AddParameters(parameters, layout.elements, &writer);
  return writer.Finish();
}

void AddParameters(const float* values, uint64_t elements, FrameWriter* writer) {
  AddFloats(values, elements, wire::Array::kParameter, nullptr, writer);
}

wire::FrameToSend EncodeParametersToSend(const BucketLayout& layout, const PlanWindow& plans, ParameterContent content,
                                         const ParameterArrays& arrays) {
  wire::FrameHeader header = HeaderFor(layout, wire::FrameKind::kParameters, plans.version());
  header.nonfinite_rounds = plans.nonfinite_rounds();
  FrameWriter writer(header);
  for (const RoundPlan& plan : plans.newest_first()) {
    if (!plan.exponents.empty()) {
      const uint32_t n = static_cast<uint32_t>(plan.exponents.size());
      writer.Add({SegmentType::kExponents, 0, 0, n, n}, plan.exponents.data());
    }
    AddFactors(plan.factors, &writer);
    const uint32_t geometry[2] = {plan.sketch_groups, plan.cells_per_group};
    writer.Add({SegmentType::kGeometry, 0, 0, 1, 8}, geometry);
  }
  if (content == ParameterContent::kShard && arrays.update_residual != nullptr) {
    AddFloats(arrays.update_residual, layout.elements, wire::Array::kUpdateResidual, arrays.lent, &writer);
  }
  if (arrays.parameter == nullptr) return writer.FinishToSend();
  if (content == ParameterContent::kBf16) {
    AddBf16(arrays.parameter, layout.elements, &writer);
    return writer.FinishToSend();
  }
  const auto add = [&](const float* values, wire::Array array) {
    if (values != nullptr) AddFloats(values, layout.elements, array, arrays.lent, &writer);
  };
  add(arrays.parameter, wire::Array::kParameter);
  if (content == ParameterContent::kState || content == ParameterContent::kShard) {
    add(arrays.first_moment, wire::Array::kFirstMoment);
    add(arrays.second_moment, wire::Array::kSecondMoment);
  }
  return writer.FinishToSend();
}

std::vector<Bytes> EncodeParameters(const BucketLayout& layout, const PlanWindow& plans, ParameterContent content,
                                    const ParameterArrays& arrays) {
  return EncodeParametersToSend(layout, plans, content, arrays).Take();
}

absl::StatusOr<PlanWindow> DecodeParameters(std::span<const Bytes> chunks, const Job& job, const BucketLayout& layout,
                                            uint64_t version, const ParameterTargets& targets) {
  GW_ASSIGN_OR_RETURN(const std::vector<wire::Chunk> parsed, wire::ParseFrame(chunks));
  return DecodeParameters(parsed, job, layout, version, targets);
}

absl::StatusOr<PlanWindow> DecodeParameters(std::span<const wire::Chunk> chunks, const Job& job,
                                            const BucketLayout& layout, uint64_t version,
                                            const ParameterTargets& targets) {
  const std::pair<wire::Array, float*> arrays[] = {{wire::Array::kParameter, targets.parameter},
                                                   {wire::Array::kFirstMoment, targets.first_moment},
                                                   {wire::Array::kSecondMoment, targets.second_moment},
                                                   {wire::Array::kUpdateResidual, targets.update_residual}};
  const ParametersWanted wanted{targets.parameter != nullptr, targets.first_moment != nullptr,
                                targets.second_moment != nullptr, targets.update_residual != nullptr};
  GW_ASSIGN_OR_RETURN(ParameterFrame frame, ReadParameters(chunks, job, layout, version, wanted));
  for (const auto& [array, target] : arrays)
    if (target != nullptr) frame.Read(array, 0, layout.elements, target);
  return frame.TakePlans();
}

absl::StatusOr<ParameterFrame> ReadParameters(std::span<const wire::Chunk> chunks, const Job& job,
                                              const BucketLayout& layout, uint64_t version,
                                              const ParametersWanted& wanted) {
  GW_RETURN_IF_ERROR(wire::CheckOrder(chunks));
  const wire::FrameHeader& header = chunks[0].header;
  const bool replaces = header.kind == wire::FrameKind::kPush && (header.flags & wire::kReplace) != 0;
  const bool kind =
      header.kind == wire::FrameKind::kInitialize || header.kind == wire::FrameKind::kParameters || replaces;
  if (!kind || header.bucket != layout.bucket || header.shard != layout.shard || header.round != version ||
      header.shape_digest != layout.shape_digest) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "not the parameters of bucket %d on shard %d at version %d (kind %d, bucket %d, shard %d, version "
        "%d, shape 0x%08x, expected 0x%08x)",
        layout.bucket, layout.shard, version, static_cast<int>(header.kind), header.bucket, header.shard, header.round,
        header.shape_digest, layout.shape_digest));
  }
  if (header.nonfinite_rounds > version) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the parameters of bucket %d at version %d say that %d rounds were no steps", layout.bucket,
                        version, header.nonfinite_rounds));
  }
  ParameterReader reader(job, layout, wanted);
  for (const wire::Chunk& chunk : chunks) {
    for (const Segment& s : chunk.segments) GW_RETURN_IF_ERROR(reader.Read(s));
  }
  GW_RETURN_IF_ERROR(reader.CheckComplete());
  if (header.kind == wire::FrameKind::kParameters) {
    GW_ASSIGN_OR_RETURN(PlanWindow plans, reader.TakePlans(version, header.nonfinite_rounds));
    return reader.Take(std::move(plans));
  }
  if (reader.has_plans()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("parameters of bucket %d that a worker sent carry a plan", layout.bucket));
  }
  return reader.Take(PlanWindow());
}

}  // namespace gradwire

// Sizes of one TAGC bucket, and the segments that frames and update frames share.
#include "common/codec/tagc/tagc_shape.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/bits/index_code.h"
#include "common/codec/bits/run_values.h"
#include "common/codec/plan/ranges.h"
#include "common/codec/tagc/list_segment.h"
#include "kernels/math/fixed_point.h"
#include "kernels/math/sketch.h"

namespace gradwire::tagc {
namespace {

constexpr uint32_t kMinIndexBlock = 1u << 16;
constexpr uint32_t kMaxIndexBlock = 1u << 22;  // its bitmap (512 KiB) still fits a chunk
constexpr double kPositionsPerBlock = 1024;    // so that headers stay below 0.3 bit per position
constexpr int kWideCellHeadroom = 4;           // bits of 32; precision is not scarce there
constexpr int kRangeOfUnseenRun = 0;           // |x| <= 1: what a run that was all zero so far is prepared for
constexpr double kFill = 0.98;                 // of a sketch's capacity, at which peeling still fails now and then

// What the settings allow a worker, beside the cells.
int32_t LimitOfBits(const TagcSpec& spec) {
  if (spec.bits == 0 && spec.cell_bits != 0) return std::numeric_limits<int32_t>::max();
  return (int32_t{1} << ((spec.bits != 0 ? spec.bits : TagcSpec::kAutoBits) - 1)) - 1;
}

int CellBits(const TagcSpec& spec, uint32_t max_workers) {
  if (spec.cell_bits != 0) return static_cast<int>(spec.cell_bits);
  int bits = 8;
  while (bits < 32 && IntegerLimit(bits, max_workers) < LimitOfBits(spec)) bits *= 2;
  return bits;
}

uint32_t IndexBlock(double density) {
  uint32_t block = kMinIndexBlock;
  while (block < kMaxIndexBlock && density * block < kPositionsPerBlock) block *= 2;
  return block;
}

// Bits that the largest value stays below the limit. Where every bit counts the largest value may exceed the limit by a
// third, or, where an integer is but a sign, by its double: that is clipped and stays in the residual.
int Headroom(const TagcSpec& spec, int32_t limit) {
  if (spec.bits == 2) return -1;
  if (spec.bits == 0 && spec.cell_bits == 32) return limit >= (1 << 16) ? kWideCellHeadroom : 0;
  const int32_t power = static_cast<int32_t>(std::bit_floor(static_cast<uint32_t>(limit)));
  return limit - power >= power / 2 && limit > 1 ? -1 : 0;
}

}  // namespace

absl::StatusOr<TagcShape> TagcShape::Make(const CodecContext& context, const TagcSpec& spec) {
  TagcShape shape;
  shape.context = context;
  shape.spec = spec;
  const int bits = CellBits(spec, shape.max_workers());
  shape.cell_bytes = bits / 8;
  shape.limit = std::min(IntegerLimit(bits, shape.max_workers()), LimitOfBits(spec));
  if (shape.limit < 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("codec 'tagc': %d-bit cells leave no range for %d workers; set cells=%d or lower max_workers",
                        bits, shape.max_workers(), bits == 8 ? 16 : 32));
  }
  if (shape.elements() >= (uint64_t{1} << 32)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("bucket %d has %d elements on shard %d, positions are 32 bits wide; lower bucket_bytes",
                        context.layout->bucket, shape.elements(), context.layout->shard));
  }
  shape.headroom = Headroom(spec, shape.limit);
  shape.index_block = IndexBlock(spec.density);
  shape.limits = LimitsFor(spec, shape.elements(), shape.max_workers());
  return shape;
}

absl::Status TagcShape::CheckPlan(uint64_t round, const RoundPlan& plan) const {
  const size_t runs = layout().runs.size();
  if (plan.exponents.size() != runs) {
    return absl::InvalidArgumentError(absl::StrFormat("plan of round %d has exponents for %d runs, bucket %d has %d",
                                                      round, plan.exponents.size(), layout().bucket, runs));
  }
  if (Calibrating(round, plan) || elements() == 0) return absl::OkStatus();
  GW_RETURN_IF_ERROR(CheckGeometry({plan.sketch_groups, plan.cells_per_group}, limits));
  for (size_t i = 0; i < runs; ++i) {
    if (plan.exponents[i] < kernels::kMinExponent || plan.exponents[i] > kernels::kMaxExponent) {
      return absl::InvalidArgumentError(absl::StrFormat("plan of round %d: exponent %d of run %d is outside [%d, %d]",
                                                        round, plan.exponents[i], i, kernels::kMinExponent,
                                                        kernels::kMaxExponent));
    }
  }
  return absl::OkStatus();
}

absl::Status TagcShape::CheckInput(const FrameIdentity& id, const RoundPlan& plan, size_t runs) const {
  if (runs != layout().runs.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("bucket %d: %d runs given, the layout has %d", id.bucket, runs, layout().runs.size()));
  }
  return CheckPlan(id.round, plan);
}

kernels::SketchArgs TagcShape::SketchOf(uint64_t round, const RoundPlan& plan) const {
  return {.salt = kernels::SketchSalt(context.job->spec().seed(), round, layout().bucket, layout().shard),
          .groups = plan.sketch_groups,
          .cells_per_group = plan.cells_per_group,
          .cell_bytes = cell_bytes};
}

size_t TagcShape::SketchedOf(const RoundPlan& plan, size_t n) const {
  if (!sketches()) return 0;
  const double capacity = CapacityOf({plan.sketch_groups, plan.cells_per_group}, spec.slack);
  return std::min(n, static_cast<size_t>(kFill * capacity / max_workers()));
}

int8_t TagcShape::NextRunExponent(int8_t current, int range) const {
  if (range <= kernels::kMinRange) {
    // Nothing (or next to nothing) anywhere: following it down would clip the first gradient that comes.
    if (current != kUncalibrated) return current;
    range = kRangeOfUnseenRun;
  }
  return NextExponent(current, range, limit, headroom);
}

std::vector<Bytes> WriteFrame(const TagcShape& shape, const FrameIdentity& id, const EncodedFrame& frame,
                              std::span<const int8_t> ranges, std::span<const uint8_t> cells) {
  wire::FrameWriter writer = BeginPush(id, shape.layout(), frame.plan);
  for (size_t begin = 0, n = 0; begin < ranges.size(); begin += n) {
    n = std::min(ranges.size() - begin, writer.max_payload());
    AddRuns(wire::SegmentType::kRanges, begin, ranges.subspan(begin, n), &writer);
  }
  if (TagcShape::Calibrating(id.round, frame.plan)) return writer.Finish();
  const std::span<const uint32_t> positions(frame.positions);
  const size_t sketched = shape.SketchedOf(frame.plan, positions.size());
  const uint64_t cut = sketched == 0 ? 0 : sketched == positions.size() ? shape.elements() : positions[sketched];
  size_t first = 0;
  for (uint64_t begin = 0; begin < cut; begin += shape.index_block) {
    const uint32_t count = static_cast<uint32_t>(std::min<uint64_t>(shape.index_block, cut - begin));
    size_t last = first;
    while (last < sketched && positions[last] < begin + count) ++last;
    AddIndex(wire::SegmentType::kIndex, positions.subspan(first, last - first), begin, count, &writer);
    first = last;
  }
  if (cut != 0) {
    const size_t width = static_cast<size_t>(shape.cell_bytes);
    AddSplit(wire::SegmentType::kCells, static_cast<uint8_t>(width), cells.data(), cells.size() / width, width,
             &writer);
  }
  AddLists(shape, positions.subspan(sketched), std::span(frame.integers).subspan(sketched), cut, shape.elements(),
           &writer);
  return writer.Finish();
}

void AddSplit(wire::SegmentType type, uint8_t param, const void* data, uint64_t count, size_t item_bytes,
              wire::FrameWriter* writer) {
  const uint64_t step = writer->max_payload() / item_bytes & ~uint64_t{7};
  for (uint64_t begin = 0; begin < count; begin += step) {
    const uint32_t n = static_cast<uint32_t>(std::min(step, count - begin));
    writer->Add({type, param, begin, n, n * static_cast<uint32_t>(item_bytes)},
                static_cast<const uint8_t*>(data) + begin * item_bytes);
  }
}

void AddRuns(wire::SegmentType type, uint64_t begin, std::span<const int8_t> values, wire::FrameWriter* writer) {
  const CodedRuns coded = EncodeRuns(values);
  writer->Add({type, static_cast<uint8_t>(coded.coding), begin, static_cast<uint32_t>(values.size()),
               static_cast<uint32_t>(coded.payload.size())},
              coded.payload.data());
}

void AddIndex(wire::SegmentType type, std::span<const uint32_t> positions, uint64_t begin, uint32_t count,
              wire::FrameWriter* writer) {
  const CodedIndex coded = EncodeIndex(positions, static_cast<uint32_t>(begin), count);
  writer->Add({type, static_cast<uint8_t>(coded.coding), begin, count, static_cast<uint32_t>(coded.payload.size())},
              coded.payload.data());
}

}  // namespace gradwire::tagc

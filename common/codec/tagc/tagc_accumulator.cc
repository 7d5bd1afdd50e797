// TAGC merging and decoding.
#include "common/codec/tagc/tagc_accumulator.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/bits/index_code.h"

namespace gradwire::tagc {

using kernels::Sign;
using wire::FrameWriter;
using wire::Segment;
using wire::SegmentType;

namespace {

constexpr uint32_t kUpdateBlock = 1u << 16;           // least number of elements that one index segment covers
constexpr size_t kMaxPositionsPerSegment = 1u << 17;  // their values, 32 bits each, fit a chunk

}  // namespace

TagcAccumulator::TagcAccumulator(const TagcShape& shape, std::unique_ptr<SketchSums> cells)
    : shape_(shape),
      ranges_(shape.layout().runs.size()),
      counters_(shape.elements(), shape.max_workers()),
      cells_(std::move(cells)),
      listed_(shape) {}

void TagcAccumulator::Open(uint64_t round, const RoundPlan& plan) {
  round_ = round;
  plan_ = plan;
  plan_status_ = shape_.CheckPlan(round, plan);
  sketch_ = {};
  if (plan_status_.ok() && !TagcShape::Calibrating(round, plan)) sketch_ = shape_.SketchOf(round, plan);
  ranges_.Clear();
  counters_.Clear();
  cells_->Open(sketch_);
  listed_.Clear();
  merged_runs_ = merged_elements_ = merged_cells_ = 0;
}

absl::Status TagcAccumulator::CheckRange(const Segment& s, uint64_t limit) const {
  if (s.count != 0 && s.begin <= limit && s.count <= limit - s.begin) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("bucket %d, round %d: segment type %d covers [%d, %d + %d) of %d",
                                                    shape_.layout().bucket, round_, static_cast<int>(s.type), s.begin,
                                                    s.begin, s.count, limit));
}

absl::Status TagcAccumulator::CheckShare(const Segment& s, uint64_t merged, uint64_t per_worker) const {
  if (merged + s.count <= per_worker * shape_.max_workers()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("bucket %d, round %d: more segments of type %d than max_workers (%d) frames hold",
                      shape_.layout().bucket, round_, static_cast<int>(s.type), shape_.max_workers()));
}

absl::Status TagcAccumulator::Add(const Segment& s) {
  GW_RETURN_IF_ERROR(plan_status_);
  switch (s.type) {
    case SegmentType::kLearningRates:
      return absl::OkStatus();  // read by who assembles the frame
    case SegmentType::kRanges:
      return AddRanges(s);
    case SegmentType::kIndex:
      return AddPositions(s);
    case SegmentType::kCells:
      return AddCells(s);
    case SegmentType::kListed:
      return AddList(s);
    default:
      return absl::InvalidArgumentError(
          absl::StrFormat("bucket %d, round %d: segment type %d does not belong in a frame of %s",
                          shape_.layout().bucket, round_, static_cast<int>(s.type), ToString(shape_.spec)));
  }
}

absl::Status TagcAccumulator::AddRanges(const Segment& s) {
  const uint64_t runs = shape_.layout().runs.size();
  GW_RETURN_IF_ERROR(CheckRange(s, runs));
  GW_RETURN_IF_ERROR(CheckShare(s, merged_runs_, runs));
  GW_RETURN_IF_ERROR(ranges_.Check(s));
  ranges_.Merge(s, Sign::kAdd);
  merged_runs_ += s.count;
  return absl::OkStatus();
}

absl::Status TagcAccumulator::AddPositions(const Segment& s) {
  GW_RETURN_IF_ERROR(CheckRange(s, cells() == 0 ? 0 : shape_.elements()));
  GW_RETURN_IF_ERROR(CheckShare(s, merged_elements_, shape_.elements()));
  scratch_.clear();
  GW_RETURN_IF_ERROR(
      DecodeIndex(static_cast<IndexCoding>(s.param), s.payload(), static_cast<uint32_t>(s.begin), s.count, &scratch_));
  if (const int64_t full = counters_.FindFull(scratch_); full >= 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("bucket %d, round %d: element %d was sent more often than max_workers (%d) allows",
                        shape_.layout().bucket, round_, full, shape_.max_workers()));
  }
  counters_.Increment(scratch_);
  merged_elements_ += s.count;
  return absl::OkStatus();
}

absl::Status TagcAccumulator::AddCells(const Segment& s) {
  GW_RETURN_IF_ERROR(CheckRange(s, cells()));
  GW_RETURN_IF_ERROR(CheckShare(s, merged_cells_, cells()));
  const size_t width = static_cast<size_t>(shape_.cell_bytes);
  if (s.param != shape_.cell_bytes || s.bytes != s.count * width) {
    return absl::InvalidArgumentError(
        absl::StrFormat("bucket %d, round %d: %d cells of %d bytes in %d bytes; cells of %d bytes are expected",
                        shape_.layout().bucket, round_, s.count, s.param, s.bytes, shape_.cell_bytes));
  }
  cells_->Merge(s, Sign::kAdd);
  merged_cells_ += s.count;
  return absl::OkStatus();
}

absl::Status TagcAccumulator::AddList(const Segment& s) {
  GW_RETURN_IF_ERROR(CheckRange(s, cells() == 0 ? 0 : shape_.elements()));
  GW_RETURN_IF_ERROR(CheckShare(s, merged_elements_, shape_.elements()));
  GW_RETURN_IF_ERROR(listed_.Add(s));
  merged_elements_ += s.count;
  return absl::OkStatus();
}

void TagcAccumulator::Remove(const Segment& s) {
  if (s.type == SegmentType::kRanges) {
    ranges_.Merge(s, Sign::kSubtract);
    merged_runs_ -= s.count;
  } else if (s.type == SegmentType::kIndex) {
    scratch_.clear();
    // It was decoded once already, by Add.
    if (!DecodeIndex(static_cast<IndexCoding>(s.param), s.payload(), static_cast<uint32_t>(s.begin), s.count, &scratch_)
             .ok()) {
      return;
    }
    counters_.Decrement(scratch_);
    merged_elements_ -= s.count;
  } else if (s.type == SegmentType::kCells) {
    cells_->Merge(s, Sign::kSubtract);
    merged_cells_ -= s.count;
  } else if (s.type == SegmentType::kListed) {
    listed_.Remove(s);
    merged_elements_ -= s.count;
  }
}

absl::StatusOr<TagcAccumulator::Sums> TagcAccumulator::Decode() {
  Sums sums;
  sums.positions = counters_.Union();
  const size_t n = sums.positions.size();
  sums.union_elements = n;
  sums.integers.resize(n);
  std::vector<uint8_t> resolved(n);
  GW_RETURN_IF_ERROR(cells_->Peel(sums.positions, sums.integers.data(), resolved.data()));
  if (!listed_.empty()) return Joined(sums.positions, sums.integers, resolved, listed_.Sums());
  size_t kept = 0;
  for (size_t i = 0; i < n; ++i) {
    if (resolved[i] == 0) {
      sums.deferred.push_back(sums.positions[i]);
    } else if (sums.integers[i] != 0) {
      sums.positions[kept] = sums.positions[i];
      sums.integers[kept] = sums.integers[i];
      ++kept;
    }
  }
  sums.positions.resize(kept);
  sums.integers.resize(kept);
  return sums;
}

// An element may be in one worker's sketch and in another's list.
TagcAccumulator::Sums TagcAccumulator::Joined(std::span<const uint32_t> positions, std::span<const int32_t> integers,
                                              std::span<const uint8_t> resolved, std::span<const Listed> listed) {
  Sums sums;
  sums.positions.reserve(positions.size() + listed.size());
  sums.integers.reserve(positions.size() + listed.size());
  size_t i = 0;
  size_t k = 0;
  while (i < positions.size() || k < listed.size()) {
    const bool sketched = i < positions.size() && (k == listed.size() || positions[i] <= listed[k].position);
    const uint32_t position = sketched ? positions[i] : listed[k].position;
    bool known = true;
    int32_t sum = 0;
    if (sketched) {
      known = resolved[i] != 0;
      sum = integers[i];
      ++i;
    }
    if (k < listed.size() && listed[k].position == position) sum += listed[k++].integer;
    ++sums.union_elements;
    if (!known) {
      sums.deferred.push_back(position);
    } else if (sum != 0) {
      sums.positions.push_back(position);
      sums.integers.push_back(sum);
    }
  }
  return sums;
}

void TagcAccumulator::WriteSums(const Sums& sums, FrameWriter* writer) const {
  const std::span<const uint32_t> all(sums.positions);
  size_t first = 0;
  for (uint64_t begin = 0; begin < shape_.elements();) {
    // As long a block as a worker's, halved where the union is dense, so that its values fit a chunk.
    uint32_t block = shape_.index_block;
    size_t last = first;
    for (;; block /= 2) {
      last = static_cast<size_t>(
          std::lower_bound(all.begin() + static_cast<ptrdiff_t>(first), all.end(), begin + block) - all.begin());
      if (block <= kUpdateBlock || last - first <= kMaxPositionsPerSegment) break;
    }
    const uint32_t count = static_cast<uint32_t>(std::min<uint64_t>(block, shape_.elements() - begin));
    AddIndex(SegmentType::kIndex, all.subspan(first, last - first), begin, count, writer);
    if (last != first) {
      const std::span<const int32_t> values = std::span(sums.integers).subspan(first, last - first);
      const int bits = BitsFor(values);
      const std::vector<uint8_t> packed = PackIntegers(values, bits);
      writer->Add({SegmentType::kValues, static_cast<uint8_t>(bits), begin, static_cast<uint32_t>(values.size()),
                   static_cast<uint32_t>(packed.size())},
                  packed.data());
    }
    begin += count;
    first = last;
  }
}

void TagcAccumulator::WriteDeferred(const Sums& sums, FrameWriter* writer) const {
  const std::span<const uint32_t> all(sums.deferred);
  for (size_t first = 0; first < all.size();) {
    const uint64_t begin = all[first] / shape_.index_block * uint64_t{shape_.index_block};
    const uint32_t count = static_cast<uint32_t>(std::min<uint64_t>(shape_.index_block, shape_.elements() - begin));
    size_t last = first;
    while (last < all.size() && all[last] < begin + count) ++last;
    AddIndex(SegmentType::kDeferred, all.subspan(first, last - first), begin, count, writer);
    first = last;
  }
}

RoundPlan TagcAccumulator::NextPlan(uint64_t union_elements) const {
  RoundPlan next = plan_;
  for (size_t i = 0; i < next.exponents.size(); ++i) {
    const int range = ranges_.Max(i);
    if (range >= kernels::kMinRange) next.exponents[i] = shape_.NextRunExponent(plan_.exponents[i], range);
  }
  if (shape_.elements() == 0) return next;
  const double density = shape_.spec.DensityAt(round_ + 1);
  Geometry geometry;
  if (cells() == 0) {
    const double share = std::min(1.0, density * shape_.max_workers());
    geometry = NextGeometry(static_cast<uint64_t>(share * static_cast<double>(shape_.elements())), 1, {}, false,
                            shape_.spec.slack, shape_.limits);
  } else {
    // In the first round many magnitudes are tied (a step is 1 everywhere), so all workers chose the same ones. They
    // will not in the next: provide for no overlap at all.
    const uint64_t seen = round_ == 1 ? counters_.Total() + listed_.entries() : union_elements;
    geometry = NextGeometry(seen, density / shape_.spec.DensityAt(round_), {plan_.sketch_groups, plan_.cells_per_group},
                            round_ > 1, shape_.spec.slack, shape_.limits);
  }
  next.sketch_groups = geometry.groups;
  next.cells_per_group = geometry.cells_per_group;
  return next;
}

absl::StatusOr<UpdateFrame> TagcAccumulator::Finish(const FrameIdentity& id, uint32_t contributors) {
  GW_RETURN_IF_ERROR(plan_status_);
  wire::FrameHeader header = HeaderFor(id, wire::FrameKind::kUpdate, shape_.layout().shape_digest);
  header.incarnation = 0;
  header.contributors = contributors;
  FrameWriter writer(header);
  const uint32_t groups = static_cast<uint32_t>(id.learning_rates.size());
  writer.Add({SegmentType::kLearningRates, 0, 0, groups, groups * 4}, id.learning_rates.data());
  UpdateFrame update;
  update.next = plan_;
  if (contributors != 0) {
    Sums sums;
    if (cells() != 0) {
      GW_ASSIGN_OR_RETURN(sums, Decode());
      WriteSums(sums, &writer);
      WriteDeferred(sums, &writer);
    }
    update.stats = {.elements = sums.union_elements - sums.deferred.size(), .deferred = sums.deferred.size()};
    update.next = NextPlan(sums.union_elements);
  }
  const uint32_t runs = static_cast<uint32_t>(update.next.exponents.size());
  writer.Add({SegmentType::kExponents, 0, 0, runs, runs}, update.next.exponents.data());
  const uint32_t geometry[2] = {update.next.sketch_groups, update.next.cells_per_group};
  writer.Add({SegmentType::kGeometry, 0, 0, 2, sizeof(geometry)}, geometry);
  update.chunks = writer.Finish();
  return update;
}

size_t TagcAccumulator::memory_bytes() const {
  return ranges_.memory_bytes() + counters_.memory_bytes() + cells_->memory_bytes() + listed_.memory_bytes();
}

}  // namespace gradwire::tagc

// TAGC merging and decoding.
#include "common/codec/tagc/tagc_accumulator.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/codec/bits/index_code.h"
#include "common/codec/bits/run_values.h"
#include "common/codec/tagc/list_segment.h"

namespace gradwire::tagc {

using kernels::Sign;
using wire::FrameWriter;
using wire::Segment;
using wire::SegmentType;

TagcAccumulator::TagcAccumulator(const TagcShape& shape, std::unique_ptr<SketchSums> cells)
    : shape_(shape), ranges_(shape.layout().runs.size()), cells_(std::move(cells)), lists_(shape) {}

void TagcAccumulator::Open(uint64_t round, const RoundPlan& plan) {
  round_ = round;
  plan_ = plan;
  plan_status_ = shape_.CheckPlan(round, plan);
  sketch_ = {};
  if (plan_status_.ok() && !TagcShape::Calibrating(round, plan)) sketch_ = shape_.SketchOf(round, plan);
  ranges_.Clear();
  sketched_ = false;
  lists_.Clear();
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

// A set of positions takes memory by how many it holds, and next to no bytes where it holds all.
absl::Status TagcAccumulator::CheckElements(const Segment& s) const {
  GW_RETURN_IF_ERROR(CheckRange(s, cells() == 0 ? 0 : shape_.elements()));
  GW_RETURN_IF_ERROR(CheckShare(s, merged_elements_, shape_.elements()));
  if (s.count <= shape_.index_block) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "bucket %d, round %d: segment type %d covers %d elements; frames of %s have segments of %d at most",
      shape_.layout().bucket, round_, static_cast<int>(s.type), s.count, ToString(shape_.spec), shape_.index_block));
}

absl::Status TagcAccumulator::OpenSketch(const Segment& s) {
  if (sketched_) return absl::OkStatus();
  if (!shape_.sketches()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("bucket %d, round %d: segment type %d of a sketch; frames of %s are lists",
                        shape_.layout().bucket, round_, static_cast<int>(s.type), ToString(shape_.spec)));
  }
  if (counters_.has_value()) {
    counters_->Clear();
  } else {
    counters_.emplace(shape_.elements(), shape_.max_workers());
  }
  cells_->Open(sketch_);
  sketched_ = true;
  return absl::OkStatus();
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
    case SegmentType::kList:
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
  GW_RETURN_IF_ERROR(DecodeRuns(static_cast<RunCoding>(s.param), s.payload(), s.count, &frame_ranges_));
  GW_RETURN_IF_ERROR(ranges_.Check(s.begin, frame_ranges_));
  ranges_.Merge(s.begin, frame_ranges_, Sign::kAdd);
  merged_runs_ += s.count;
  return absl::OkStatus();
}

absl::Status TagcAccumulator::AddPositions(const Segment& s) {
  GW_RETURN_IF_ERROR(CheckElements(s));
  scratch_.clear();
  GW_RETURN_IF_ERROR(
      DecodeIndex(static_cast<IndexCoding>(s.param), s.payload(), static_cast<uint32_t>(s.begin), s.count, &scratch_));
  GW_RETURN_IF_ERROR(OpenSketch(s));
  if (const int64_t full = counters_->Increment(scratch_); full >= 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("bucket %d, round %d: element %d was sent more often than max_workers (%d) allows",
                        shape_.layout().bucket, round_, full, shape_.max_workers()));
  }
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
  GW_RETURN_IF_ERROR(OpenSketch(s));
  cells_->Merge(s, Sign::kAdd);
  merged_cells_ += s.count;
  return absl::OkStatus();
}

absl::Status TagcAccumulator::AddList(const Segment& s) {
  GW_RETURN_IF_ERROR(CheckElements(s));
  GW_RETURN_IF_ERROR(lists_.Add(s));
  merged_elements_ += s.count;
  return absl::OkStatus();
}

void TagcAccumulator::Remove(const Segment& s) {
  if (s.type == SegmentType::kRanges) {
    // They were decoded once already, by Add.
    if (!DecodeRuns(static_cast<RunCoding>(s.param), s.payload(), s.count, &frame_ranges_).ok()) return;
    ranges_.Merge(s.begin, frame_ranges_, Sign::kSubtract);
    merged_runs_ -= s.count;
  } else if (s.type == SegmentType::kIndex) {
    scratch_.clear();
    // It was decoded once already, by Add.
    if (!DecodeIndex(static_cast<IndexCoding>(s.param), s.payload(), static_cast<uint32_t>(s.begin), s.count, &scratch_)
             .ok()) {
      return;
    }
    counters_->Decrement(scratch_);
    merged_elements_ -= s.count;
  } else if (s.type == SegmentType::kCells) {
    cells_->Merge(s, Sign::kSubtract);
    merged_cells_ -= s.count;
  } else if (s.type == SegmentType::kList) {
    lists_.Remove(s);
    merged_elements_ -= s.count;
  }
}

absl::StatusOr<TagcAccumulator::Sums> TagcAccumulator::Decode() {
  Sums sums;
  sums.sent = (sketched_ ? counters_->Total() : 0) + lists_.entries();
  if (!sketched_) {
    lists_.Take(&sums.positions, &sums.integers);
    return sums;
  }
  GW_RETURN_IF_ERROR(DecodeSketch(&sums));
  if (lists_.empty()) return sums;
  // An element may be in one worker's sketch and in another's list.
  std::vector<uint32_t> positions;
  std::vector<int32_t> integers;
  lists_.Take(&positions, &integers);
  Sums all;
  all.deferred = std::move(sums.deferred);
  all.sent = sums.sent;
  all.positions.reserve(sums.positions.size() + positions.size());
  all.integers.reserve(sums.positions.size() + positions.size());
  size_t deferred = 0;
  for (size_t i = 0, k = 0; i < sums.positions.size() || k < positions.size();) {
    const bool sketched = i < sums.positions.size() && (k == positions.size() || sums.positions[i] <= positions[k]);
    const uint32_t position = sketched ? sums.positions[i] : positions[k];
    uint32_t bits = sketched ? static_cast<uint32_t>(sums.integers[i++]) : 0;
    // It fits where frames are those of honest workers; the cells of others may say anything.
    if (k < positions.size() && positions[k] == position) bits += static_cast<uint32_t>(integers[k++]);
    const auto sum = static_cast<int32_t>(bits);
    while (deferred < all.deferred.size() && all.deferred[deferred] < position) ++deferred;
    if (sum == 0 || (deferred < all.deferred.size() && all.deferred[deferred] == position)) continue;
    all.positions.push_back(position);
    all.integers.push_back(sum);
  }
  return all;
}

absl::Status TagcAccumulator::DecodeSketch(Sums* sums) {
  sums->positions = counters_->Union();
  const size_t n = sums->positions.size();
  sums->integers.resize(n);
  std::vector<uint8_t> resolved(n);
  GW_RETURN_IF_ERROR(cells_->Peel(sums->positions, sums->integers.data(), resolved.data()));
  size_t kept = 0;
  for (size_t i = 0; i < n; ++i) {
    if (resolved[i] == 0) {
      sums->deferred.push_back(sums->positions[i]);
    } else if (sums->integers[i] != 0) {
      sums->positions[kept] = sums->positions[i];
      sums->integers[kept] = sums->integers[i];
      ++kept;
    }
  }
  sums->positions.resize(kept);
  sums->integers.resize(kept);
  return absl::OkStatus();
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

// The same for every mixture of forms that defers nothing.
RoundPlan TagcAccumulator::NextPlan(const Sums& sums) const {
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
    const uint64_t seen = round_ == 1 ? sums.sent : sums.positions.size() + sums.deferred.size();
    geometry = NextGeometry(seen, density / shape_.spec.DensityAt(round_), {plan_.sketch_groups, plan_.cells_per_group},
                            round_ > 1, shape_.spec.slack, shape_.limits);
  }
  next.sketch_groups = geometry.groups;
  next.cells_per_group = geometry.cells_per_group;
  return next;
}

absl::StatusOr<UpdateFrame> TagcAccumulator::Finish(const FrameIdentity& id, uint32_t contributors) {
  GW_RETURN_IF_ERROR(plan_status_);
  wire::FrameWriter writer = BeginUpdateFrame(id, shape_.layout(), contributors);
  UpdateFrame update;
  update.next = plan_;
  if (contributors != 0) {
    Sums sums;
    if (cells() != 0) {
      GW_ASSIGN_OR_RETURN(sums, Decode());
      AddLists(shape_, sums.positions, sums.integers, 0, shape_.elements(), &writer);
      WriteDeferred(sums, &writer);
    }
    update.stats = {.elements = sums.positions.size(), .deferred = sums.deferred.size()};
    update.next = NextPlan(sums);
  }
  AddRuns(SegmentType::kExponents, 0, update.next.exponents, &writer);
  const uint32_t geometry[2] = {update.next.sketch_groups, update.next.cells_per_group};
  writer.Add({SegmentType::kGeometry, 0, 0, 2, sizeof(geometry)}, geometry);
  update.chunks = writer.Finish();
  return update;
}

size_t TagcAccumulator::memory_bytes() const {
  return ranges_.memory_bytes() + (counters_.has_value() ? counters_->memory_bytes() : 0) + cells_->memory_bytes() +
         lists_.memory_bytes();
}

}  // namespace gradwire::tagc

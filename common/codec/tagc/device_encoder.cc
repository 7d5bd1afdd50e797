// TAGC frames of gradients on a device: selected, quantised and, where the form asks for it, sketched there. A frame
// waits for how many elements were taken, and for them. What is taken has left `pending`, so from there on nothing may
// fail.
#include "common/codec/tagc/device_encoder.h"

#include <cstring>
#include <utility>

#include "common/base/status_macros.h"
#include "common/codec/bits/salts.h"
#include "common/codec/frame/device_places.h"
#include "kernels/cuda/device_bucket.h"
#include "kernels/math/select.h"

namespace gradwire::tagc {
namespace {

using kernels::cuda::DeviceBucket;
using kernels::cuda::RoundMemory;

class DeviceEncoder final : public Encoder {
 public:
  DeviceEncoder(const TagcShape& shape, DeviceBucket* bucket) : shape_(shape), bucket_(*bucket) {}

  absl::StatusOr<EncodedFrame> Encode(const FrameIdentity& id, const RoundPlan& plan,
                                      std::span<const RunInput> runs) override {
    GW_RETURN_IF_ERROR(shape_.CheckInput(id, plan, runs.size()));
    EncodedFrame frame;
    frame.plan = plan;
    cells_.clear();
    GW_RETURN_IF_ERROR(TagcShape::Calibrating(id.round, plan) ? FindRanges(id, plan, runs)
                                                              : Take(id, plan, runs, &frame));
    frame.chunks = WriteFrame(shape_, id, frame, ranges_, cells_);
    frame.bytes = TotalSize(frame.chunks);
    return frame;
  }

 private:
  absl::StatusOr<DevicePlaces> PlacesOf(const FrameIdentity& id, const RoundPlan& plan,
                                        std::span<const RunInput> runs) {
    return DevicePlaces::Make(shape_.layout(), &bucket_, [&](size_t r, kernels::cuda::RunPlace* place) {
      const Run& run = shape_.layout().runs[r];
      place->x = runs[r].pending;
      place->selection = runs[r].device_selection;
      place->key = runs[r].selection.key;
      place->keep_below = runs[r].selection.keep_below;
      place->phase = TiePhaseOf(*shape_.context.job, run, id.round);
      place->first_element = run.offset;
      place->unit = UnitOf(plan.exponents[r]);
    });
  }
  void SetRanges(size_t runs, const uint8_t* largest) {
    ranges_.resize(runs);
    for (size_t i = 0; i < runs; ++i) {
      ranges_[i] = static_cast<int8_t>(kernels::cuda::RangeOfLargest(reinterpret_cast<const uint32_t*>(largest)[i]));
    }
  }

  absl::Status FindRanges(const FrameIdentity& id, const RoundPlan& plan, std::span<const RunInput> runs) {
    GW_ASSIGN_OR_RETURN(const DevicePlaces places, PlacesOf(id, plan, runs));
    GW_ASSIGN_OR_RETURN(const RoundMemory memory, RoundMemory::Make(&bucket_, runs.size() * sizeof(uint32_t)));
    bucket_.backend().LargestOfRuns(places.runs(), reinterpret_cast<uint32_t*>(memory.data()), bucket_.stream());
    SetRanges(runs.size(), bucket_.Fetch(memory.data(), runs.size() * sizeof(uint32_t), &spill_));
    return absl::OkStatus();
  }

  absl::Status Take(const FrameIdentity& id, const RoundPlan& plan, std::span<const RunInput> runs,
                    EncodedFrame* frame) {
    const uint64_t elements = shape_.elements();
    GW_ASSIGN_OR_RETURN(const DevicePlaces places, PlacesOf(id, plan, runs));
    // How many were taken, then the largest magnitudes: both come to the host.
    const size_t notes_bytes = sizeof(uint64_t) + runs.size() * sizeof(uint32_t);
    GW_ASSIGN_OR_RETURN(const RoundMemory notes, RoundMemory::Make(&bucket_, notes_bytes));
    const kernels::SketchArgs sketch = shape_.SketchOf(id.round, plan);
    const size_t taken_bytes = 2 * elements * sizeof(uint32_t);
    GW_ASSIGN_OR_RETURN(const RoundMemory taken, RoundMemory::Make(&bucket_, taken_bytes + CellBytes(sketch)));
    auto* positions = reinterpret_cast<uint32_t*>(taken.data());
    auto* integers = reinterpret_cast<int32_t*>(positions + elements);
    bucket_.backend().LargestOfRuns(places.runs(), reinterpret_cast<uint32_t*>(notes.data() + sizeof(uint64_t)),
                                    bucket_.stream());
    bucket_.backend().TakeSelectedOfRuns(places.runs(), shape_.limit, positions, integers,
                                         reinterpret_cast<uint64_t*>(notes.data()), bucket_.stream());
    const uint8_t* results = bucket_.Fetch(notes.data(), notes_bytes, &spill_);
    uint64_t n = 0;
    std::memcpy(&n, results, sizeof(n));
    SetRanges(runs.size(), results + sizeof(n));
    Sketch(sketch, positions, integers, n, taken.data() + taken_bytes, frame);
    return absl::OkStatus();
  }

  size_t CellBytes(const kernels::SketchArgs& sketch) const {
    if (!shape_.sketches()) return 0;
    return uint64_t{sketch.groups} * sketch.cells_per_group * static_cast<size_t>(shape_.cell_bytes);
  }

  // Adds what was taken to `cells`, as far as they hold it, and brings both to the host.
  void Sketch(const kernels::SketchArgs& sketch, const uint32_t* positions, const int32_t* integers, size_t n,
              uint8_t* cells, EncodedFrame* frame) {
    if (n == 0) return;
    if (const size_t sketched = shape_.SketchedOf(frame->plan, n); sketched != 0) {
      const size_t bytes = CellBytes(sketch);
      bucket_.runtime().Fill(cells, 0, bytes, bucket_.stream());
      bucket_.backend().SketchAdd(positions, integers, sketched, sketch, cells, bucket_.stream());
      const uint8_t* const result = bucket_.Fetch(cells, bytes, &spill_);
      cells_.assign(result, result + bytes);
    }
    frame->positions.resize(n);
    frame->integers.resize(n);
    const size_t bytes = n * sizeof(uint32_t);
    std::memcpy(frame->positions.data(), bucket_.Fetch(positions, bytes, &spill_), bytes);
    std::memcpy(frame->integers.data(), bucket_.Fetch(integers, bytes, &spill_), bytes);
  }

  const TagcShape shape_;
  DeviceBucket& bucket_;
  // Kept between rounds.
  std::vector<int8_t> ranges_;
  std::vector<uint8_t> cells_;
  std::vector<uint8_t> spill_;
};

}  // namespace

std::unique_ptr<Encoder> MakeDeviceEncoder(const TagcShape& shape, DeviceBucket* bucket) {
  return std::make_unique<DeviceEncoder>(shape, bucket);
}

}  // namespace gradwire::tagc

// Summed cells in the memory of a device: merged as they come, peeled there. The positions come from the host, which
// decodes indexes, and what was resolved goes back to it.
#include <algorithm>
#include <cstring>
#include <utility>

#include "common/base/status_macros.h"
#include "common/codec/plan/ranges.h"
#include "common/codec/tagc/position_counters.h"
#include "common/codec/tagc/sketch_sums.h"
#include "kernels/cuda/device_bucket.h"

namespace gradwire::tagc {
namespace {

using kernels::cuda::DeviceBucket;
using kernels::cuda::JobMemory;
using kernels::cuda::RoundMemory;

constexpr uint64_t kResultBytes = sizeof(int32_t) + sizeof(uint8_t);  // of one position: its integer, resolved or not

class DeviceSums final : public SketchSums {
 public:
  DeviceSums(const TagcShape& shape, DeviceBucket* bucket, uint8_t* cells)
      : shape_(shape), bucket_(*bucket), cells_(cells) {}

  void Open(const kernels::SketchArgs& sketch) override {
    sketch_ = sketch;
    const uint64_t cells = uint64_t{sketch.groups} * sketch.cells_per_group;
    bucket_.runtime().Fill(cells_, 0, cells * Width(), bucket_.stream());
  }

  void Merge(const wire::Segment& s, kernels::Sign sign) override {
    bucket_.Send(s.payload(), [&](const uint8_t* piece, size_t offset, size_t size) {
      bucket_.backend().AddCells(cells_ + s.begin * Width() + offset, piece, shape_.cell_bytes, size / Width(), sign,
                                 bucket_.stream());
    });
  }

  absl::Status Peel(std::span<const uint32_t> positions, int32_t* integers, uint8_t* resolved) override {
    // Beside the job's memory: a union may be anything up to the bucket, and rarely is.
    const size_t n = positions.size();
    const size_t integers_at = JobMemory::Rounded(n, sizeof(uint32_t));
    GW_ASSIGN_OR_RETURN(const RoundMemory memory, RoundMemory::Make(&bucket_, integers_at + n * kResultBytes));
    if (n == 0) return absl::OkStatus();
    auto* device_positions = reinterpret_cast<uint32_t*>(memory.data());
    auto* device_integers = reinterpret_cast<int32_t*>(memory.data() + integers_at);
    auto* device_resolved = reinterpret_cast<uint8_t*>(device_integers + n);
    bucket_.Upload(device_positions, positions.data(), positions.size_bytes());
    bucket_.backend().SketchPeel(cells_, sketch_, device_positions, n, device_integers, device_resolved,
                                 bucket_.stream());
    // It fits the pinned memory unless workers sent more than the codec's density.
    std::vector<uint8_t> spill;
    const uint8_t* results = bucket_.Fetch(device_integers, n * kResultBytes, &spill);
    std::memcpy(integers, results, n * sizeof(int32_t));
    std::memcpy(resolved, results + n * sizeof(int32_t), n);
    return absl::OkStatus();
  }

  size_t memory_bytes() const override { return bucket_.pinned_bytes(); }

 private:
  size_t Width() const { return static_cast<size_t>(shape_.cell_bytes); }

  const TagcShape shape_;
  DeviceBucket& bucket_;
  uint8_t* const cells_;  // in device memory
  kernels::SketchArgs sketch_;
};

// At least 1, so that there is memory to point to.
uint64_t CellBytes(const TagcShape& shape) {
  return shape.sketches() ? shape.limits.max_cells * static_cast<uint64_t>(shape.cell_bytes) : 1;
}

}  // namespace

DeviceNeeds NeedsOnDevice(const TagcShape& shape) {
  DeviceNeeds needs;
  needs.device_bytes = JobMemory::Rounded(CellBytes(shape), 1);
  if (shape.sketches()) needs.pinned_bytes = (static_cast<uint64_t>(shape.limits.max_union) + 1) * kResultBytes;
  return needs;
}

absl::StatusOr<std::unique_ptr<SketchSums>> MakeDeviceSums(const TagcShape& shape, DeviceBucket* bucket) {
  const absl::StatusOr<uint8_t*> cells = bucket->memory().Take<uint8_t>(CellBytes(shape));
  GW_RETURN_IF_ERROR(cells.status());
  return std::make_unique<DeviceSums>(shape, bucket, *cells);
}

}  // namespace gradwire::tagc
